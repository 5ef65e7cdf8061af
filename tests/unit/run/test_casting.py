"""Casts: the bits that torch would write, and the count of what became special."""

from __future__ import annotations

import numpy as np
import pytest

from running import raw
from unshard.dtypes import BF16, F8_E4M3, F16, F32, F64, DType
from unshard.run.casting import cast_into, holds_special

EVERY_HALF = np.arange(1 << 16, dtype=np.uint16)


def every_float32_corner() -> np.ndarray:
    """Every float32 by its upper half, with lower halves that decide how it is rounded: ties and neighbours."""
    low = np.array([0x0000, 0x0001, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return ((EVERY_HALF.astype(np.uint32) << 16)[:, None] | low[None, :]).reshape(-1).view(np.float32)


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounding to nearest even by definition: of the two neighbours the nearer, or the one whose last bit is 0."""
    bits = values.view(np.uint32).astype(np.uint64)
    lower, rest = bits >> 16, bits & 0xFFFF
    return (lower + ((rest > 0x8000) | ((rest == 0x8000) & (lower & 1 == 1)))).astype(np.uint16)


def test_bfloat16_is_rounded_to_nearest_even() -> None:
    values = every_float32_corner()
    values = values[~np.isnan(values)]
    out = np.empty(values.shape, BF16.numpy)
    cast_into(out, values, BF16)
    assert np.array_equal(raw(out, BF16), round_to_bfloat16(values))


def test_nan_stays_nan() -> None:
    values = every_float32_corner()
    values = values[np.isnan(values)]
    for dtype in (BF16, F16):
        out = np.empty(values.shape, dtype.numpy)
        assert cast_into(out, values, dtype).nan == values.size
        assert np.isnan(out).all()


@pytest.mark.torch
@pytest.mark.parametrize("dtype", [BF16, F16, F64])
@pytest.mark.parametrize("stored", [F32, BF16, F16])
def test_same_bits_as_torch(stored: DType, dtype: DType) -> None:
    torch = pytest.importorskip("torch")
    values = every_float32_corner() if stored == F32 else EVERY_HALF.view(stored.numpy)
    with np.errstate(invalid="ignore"):
        values = values[~np.isnan(values)]
    out = np.empty(values.shape, dtype.numpy)
    cast_into(out, values, dtype)
    source = torch.from_numpy(values.view(f"i{stored.itemsize}").copy()).view(getattr(torch, stored.torch_name))
    expected = source.to(getattr(torch, dtype.torch_name))
    assert out.tobytes() == expected.view(getattr(torch, f"int{dtype.itemsize * 8}")).numpy().tobytes()


def test_counts_of_special_values() -> None:
    values = np.array([1.0, np.nan, -np.nan, np.inf, -np.inf, 65504.0, 65520.0, -1e30, 3.4e38, -3.4e38], np.float32)
    half, brain = np.empty(values.shape, np.float16), np.empty(values.shape, BF16.numpy)
    counted = cast_into(half, values, F16)
    assert (counted.elements, counted.nan, counted.overflow) == (10, 2, 4)
    counted = cast_into(brain, values, BF16)
    assert (counted.elements, counted.nan, counted.overflow) == (10, 2, 2)


def test_overflow_of_a_type_without_infinities() -> None:
    values = np.array([1.0, 448.0, 1e6, np.nan], np.float32)
    counted = cast_into(np.empty(values.shape, F8_E4M3.numpy), values, F8_E4M3)
    assert (counted.nan, counted.overflow) == (1, 1)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_special_values_are_seen_by_their_bits(dtype: DType) -> None:
    with np.errstate(invalid="ignore"):
        special = ~np.isfinite(EVERY_HALF.view(dtype.numpy))
    for bits in EVERY_HALF[::7]:
        one = np.array([0, bits, 0], np.uint16).view(dtype.numpy)
        assert holds_special(one, dtype) == special[bits]


def test_casts_work_on_strided_views() -> None:
    values = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
    out = np.zeros((6, 16), BF16.numpy)
    cast_into(out[:, ::2], values.T, BF16)
    assert np.array_equal(out[:, ::2], values.T.astype(BF16.numpy))
    assert not out[:, 1::2].any()


@pytest.mark.filterwarnings("error")
def test_special_values_cause_no_warnings() -> None:
    signalling = np.array([0x7F80_0001, 0xFF80_0001, 0x7F80_0000, 0x7F7F_FFFF], np.uint32).view(np.float32)
    assert cast_into(np.empty(4, np.float16), signalling, F16).nan == 2
    brain = np.array([0x7F81, 0xFF81], np.uint16).view(BF16.numpy)
    assert cast_into(np.empty(2, np.float16), brain, F16).nan == 2
