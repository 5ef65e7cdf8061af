"""The arithmetic of fusing: against float64, and the same bits however the rows are cut."""

from __future__ import annotations

import numpy as np
import pytest

from unshard.adapters.functions import add_and_normalize, add_bias, add_low_rank
from unshard.dtypes import BF16

RANDOM = np.random.default_rng(0)


def draw(*shape: int, dtype: object = np.float32) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16.numpy])
def test_low_rank_in_float32(dtype: object) -> None:
    weight, left, right = draw(9, 11, dtype=dtype), draw(9, 5, dtype=dtype), draw(5, 11, dtype=dtype)
    result = add_low_rank([weight, left, right], {"scaling": 1.5})
    exact = weight.astype(np.float64) + 1.5 * (left.astype(np.float64) @ right.astype(np.float64))
    assert result.dtype == np.float32
    assert np.allclose(result, exact, rtol=1e-6, atol=1e-6)


def test_float64_stays_float64() -> None:
    weight, left, right = RANDOM.standard_normal((4, 6)), draw(4, 2), draw(2, 6)
    result = add_low_rank([weight, left, right], {"scaling": 0.3})
    assert result.dtype == np.float64
    assert np.allclose(result, weight + 0.3 * (left.astype(np.float64) @ right), rtol=1e-14, atol=1e-14)


def test_packs_of_experts() -> None:
    weight, left, right = draw(3, 4, 6), draw(3, 4, 2), draw(3, 2, 6)
    result = add_low_rank([weight, left, right], {"scaling": 2})
    assert np.allclose(result, weight + 2 * np.einsum("emr,ern->emn", left, right), atol=1e-5)


def test_convolutions_are_matrices() -> None:
    weight, left, right = draw(4, 3, 2, 2), draw(4, 2), draw(2, 12)
    result = add_low_rank([weight, left, right], {"scaling": 1})
    assert np.allclose(result, weight + (left @ right).reshape(weight.shape), atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 5, 64])
def test_bits_do_not_depend_on_how_many_rows_are_computed_together(rows: int) -> None:
    right, parameters = draw(33, 257), {"scaling": 0.7, "outputs": 0}
    weight, left, magnitude = draw(129, 257), draw(129, 33), draw(129)
    for function, last in ((add_low_rank, []), (add_and_normalize, [magnitude])):
        whole = function([weight, left, right, *last], parameters)
        parts = [
            function([weight[start:stop], left[start:stop], right, *[value[start:stop] for value in last]], parameters)
            for start, stop in ((start, min(start + rows, 129)) for start in range(0, 129, rows))
        ]
        assert np.concatenate(parts).tobytes() == whole.tobytes()


@pytest.mark.parametrize("outputs", [0, 1])
def test_dora_gives_each_output_its_magnitude(outputs: int) -> None:
    weight, left, right = draw(6, 8), draw(6, 2), draw(2, 8)
    magnitude = np.abs(draw(weight.shape[outputs])) + 1
    result = add_and_normalize([weight, left, right, magnitude], {"scaling": 0.5, "outputs": outputs})
    assert np.allclose(np.linalg.norm(result, axis=1 - outputs), magnitude, rtol=1e-6)
    direction = weight + 0.5 * left @ right
    assert np.allclose(result / direction, (result / direction).mean(axis=1 - outputs, keepdims=True), rtol=1e-4)


def test_bias() -> None:
    assert np.array_equal(add_bias([np.float32([1, 2]), np.float32([4, 8])], {"scaling": 0.5}), np.float32([3, 6]))


def test_inputs_are_not_changed() -> None:
    inputs = [draw(4, 4), draw(4, 2), draw(2, 4), draw(4)]
    before = [value.copy() for value in inputs]
    add_and_normalize(inputs, {"scaling": 1.0, "outputs": 0})
    add_bias([inputs[3], inputs[3]], {"scaling": 1.0})
    assert all(np.array_equal(a, b) for a, b in zip(inputs, before, strict=True))
