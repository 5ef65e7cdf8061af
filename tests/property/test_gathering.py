"""Whatever the algebra makes of a tensor, gathering gives what numpy gives: in bands, in short reads, cast or not."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from running import ROOT, raw, write_array
from unshard.dtypes import BF16, F16
from unshard.files import OpenFiles
from unshard.run import bands
from unshard.run.bands import is_crossed, pieces_by_band, split_bands, split_evenly, split_reads
from unshard.run.casting import raw_dtype
from unshard.run.gathering import Gatherer, read_tensor
from unshard.tensors import Tensor, concat, stack

SHAPES = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)


@pytest.fixture(autouse=True, params=[0, 40, 1 << 20], ids=lambda gap: f"gap{gap}")
def _gap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gaps that are always skipped, sometimes, never."""
    monkeypatch.setattr(bands, "READ_THROUGH", request.param)


@st.composite
def transformed(draw: st.DrawFn, directory: Path) -> tuple[Tensor, np.ndarray]:
    """A tensor that went through a few operations, and the same of numpy."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    values = np.random.default_rng(draw(st.integers(0, 99))).standard_normal(shape).astype(np.float32)
    tensor = write_array(directory, "a", values, padding=draw(st.integers(0, 9)))
    for _ in range(draw(st.integers(0, 4))):
        operation = draw(st.sampled_from(["transpose", "slice", "concat", "stack", "flatten", "split", "repeat"]))
        axis = draw(st.integers(0, tensor.ndim - 1)) if tensor.ndim else 0
        if operation == "transpose":
            order = draw(st.permutations(range(tensor.ndim)))
            tensor, values = tensor.transpose(order), values.transpose(order)
        elif operation == "slice" and tensor.ndim and tensor.size:
            start = draw(st.integers(0, tensor.shape[axis] - 1))
            step = draw(st.integers(1, 3))
            index = (slice(None),) * axis + (slice(start, None, step),)
            tensor, values = tensor.slice(axis, start, tensor.shape[axis], step), values[index]
        elif operation == "concat" and tensor.ndim and tensor.size < 500:
            other = write_array(directory, "b", np.ascontiguousarray(values[::-1]))
            tensor, values = concat([tensor, other], axis), np.concatenate([values, values[::-1]], axis)
            values = values.copy()
            tensor = write_array(directory, "a", values) if draw(st.booleans()) else tensor
            break  # a second concatenation would overwrite the file
        elif operation == "stack" and tensor.size < 500:
            tensor, values = stack([tensor, tensor], axis), np.stack([values, values], axis)
        elif operation == "flatten":
            tensor, values = tensor.reshape((tensor.size,)), values.reshape(-1)
        elif operation == "split" and tensor.ndim and tensor.shape[axis] % 2 == 0 and tensor.size:
            shape = (*tensor.shape[:axis], 2, tensor.shape[axis] // 2, *tensor.shape[axis + 1 :])
            tensor, values = tensor.reshape(shape), values.reshape(shape)
        elif operation == "repeat" and tensor.ndim and tensor.shape[axis] == 1:
            tensor, values = tensor.broadcast(axis, 3), np.repeat(values, 3, axis)
    return tensor, values


@given(st.data())
def test_reading_a_tensor(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        tensor, values = data.draw(transformed(Path(name)))
        assert np.array_equal(read_tensor(tensor, {ROOT: Path(name)}), values)
        for dtype in (BF16, F16):
            found = read_tensor(tensor.cast(dtype), {ROOT: Path(name)})
            assert np.array_equal(raw(found, dtype), raw(values.astype(dtype.numpy), dtype))


@given(st.data())
def test_reading_a_box(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        tensor, values = data.draw(transformed(Path(name)))
        bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in tensor.shape]
        expected = values[tuple([slice(low, high) for low, high in bounds])]
        for axis, (low, high) in enumerate(bounds):
            tensor = tensor.slice(axis, low, high)
        assert np.array_equal(read_tensor(tensor, {ROOT: Path(name)}), expected)


@given(st.data(), st.integers(1, 60), st.integers(4, 80))
def test_bands_make_the_whole(data: st.DataObject, most: int, buffer: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        tensor, values = data.draw(transformed(Path(name)))
        files = OpenFiles({ROOT: Path(name)})
        gatherer = Gatherer(files, buffer)
        found = []
        for box, pieces in pieces_by_band(tensor.chunks, split_bands(tensor.grid, most)):
            out = np.empty(box.sizes, raw_dtype(tensor.dtype))
            gatherer.gather(pieces, box, out, tensor.dtype)
            found.append(out.reshape(-1))
        files.close()
        flat = np.concatenate(found) if found else np.empty(0, np.uint32)
        assert np.array_equal(flat, raw(values, tensor.dtype).reshape(-1))


@given(st.data())
def test_a_flat_range(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        tensor, values = data.draw(transformed(Path(name)))
        start = data.draw(st.integers(0, tensor.size))
        stop = data.draw(st.integers(start, tensor.size))
        out = np.empty(stop - start, raw_dtype(tensor.dtype))
        files = OpenFiles({ROOT: Path(name)})
        Gatherer(files, 64).gather_flat(tensor.chunks, tensor.grid, start, stop, out, tensor.dtype)
        files.close()
        assert np.array_equal(out, raw(values, tensor.dtype).reshape(-1)[start:stop])


@given(st.data(), st.integers(4, 100))
def test_reads_cover_a_piece_once_and_fit_the_buffer(data: st.DataObject, most: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        tensor, _ = data.draw(transformed(Path(name)))
        for piece in tensor.chunks:
            seen = np.zeros(piece.box.sizes, int)
            for read in split_reads(piece, most):
                assert read.size <= most or read.size == piece.extent.dtype.itemsize
                seen[tuple([slice(a, b) for a, b in zip(read.box.offsets, read.box.stops, strict=True)])] += 1
            assert (seen == 1).all()


@given(SHAPES, st.integers(1, 50))
def test_bands_are_contiguous_bounded_and_in_order(shape: tuple[int, ...], most: int) -> None:
    order = np.arange(int(np.prod(shape))).reshape(shape)
    flat = []
    for box in split_bands(shape, most):
        assert 1 <= box.volume <= most
        flat.append(order[tuple([slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True)])].reshape(-1))
    assert np.array_equal(np.concatenate(flat), order.reshape(-1))


@given(st.integers(1, 1000), st.integers(1, 100))
def test_even_parts(length: int, most: int) -> None:
    parts = [stop - start for start, stop in split_evenly(length, most)]
    assert sum(parts) == length
    assert max(parts) <= most
    assert max(parts) - min(parts) <= 1


def test_only_transposes_are_crossed(tmp_path: Path) -> None:
    tensor = write_array(tmp_path, "a", np.zeros((6, 4, 2), np.float32))
    plain = [
        tensor,
        tensor.transpose((1, 0, 2)),
        tensor.slice(2, 0, 2, 2),
        tensor.slice(0, 1, 5),
        tensor.reshape((48,)),
    ]
    assert not any(is_crossed(other.chunks[0]) for other in plain)
    assert is_crossed(tensor.transpose().chunks[0])
    assert is_crossed(tensor.transpose((2, 0, 1)).chunks[0])
    assert not is_crossed(tensor.slice(0, 0, 1).broadcast(0, 3).chunks[0])
