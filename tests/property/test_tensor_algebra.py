"""assemble(transform(chunks)) == transform(assemble(chunks)), for any sharding and any program of operations."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import Array, Disk, cut_randomly
from unshard.dtypes import BF16, F16, F32, I16, DType
from unshard.tensors import Chunk, Tensor, concat, stack

Draw = Any
Pair = tuple[Tensor, Array]


def draw_tensor(draw: Draw, disk: Disk, shape: tuple[int, ...], dtype: DType, name: str) -> Pair:
    """A tensor cut at random, its pieces stored in any order of axes, with replicas, and the array it stands for."""
    array = (np.arange(prod(shape)) * 37 % 1021 + 1 / 3).reshape(shape)
    array = array.astype(dtype.numpy)
    chunks = []
    for number, box in enumerate(cut_randomly(shape, lambda low, high: draw(st.integers(low, high)))):
        piece = array[tuple(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True))]
        for replica in range(draw(st.integers(1, 2))):
            order = draw(st.permutations(range(array.ndim)))
            file = f"{name}-{draw(st.integers(0, 2))}"
            extent = disk.save(piece, dtype, file, order=order, gap=draw(st.integers(0, 3)))
            chunks.append(Chunk(box, extent, 2 * number + replica))
    return Tensor(name, dtype, shape, tuple(chunks)), array


def shapes(least: int = 0, most: int = 4, largest: int = 6) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, largest), min_size=least, max_size=most).map(tuple)


def draw_factors(draw: Draw, size: int) -> tuple[int, ...]:
    """A shape of the same number of elements."""
    if size == 0:
        return draw(st.lists(st.integers(0, 3), max_size=3).map(lambda sizes: (*sizes, 0)))
    factors = []
    while size > 1 and len(factors) < 4:
        factor = draw(st.sampled_from([number for number in range(1, size + 1) if size % number == 0]))
        factors.append(factor)
        size //= factor
    return (*factors, size) if size > 1 else tuple(factors)


def apply_random(draw: Draw, tensor: Tensor, array: Array) -> Pair:
    """One random operation on both."""
    if not tensor.shape:
        return (tensor.reshape((1,)), array.reshape((1,)))
    axis = draw(st.integers(0, tensor.ndim - 1))
    length = tensor.shape[axis]
    kind = draw(
        st.sampled_from(["slice", "select", "transpose", "reshape", "split", "stack", "unstack", "broadcast", "cast"])
    )
    if kind == "slice":
        start, stop = draw(st.integers(0, length + 1)), draw(st.integers(0, length + 2))
        step = draw(st.integers(1, 3))
        where = (slice(None),) * axis + (slice(start, stop, step),)
        return tensor.slice(axis, start, stop, step), array[where]
    if kind == "select" and length:
        index = draw(st.integers(0, length - 1))
        return tensor.select(axis, index), array.take(index, axis)
    if kind == "transpose":
        order = draw(st.permutations(range(tensor.ndim)))
        return tensor.transpose(order), array.transpose(order)
    if kind == "reshape":
        shape = draw_factors(draw, tensor.size)
        return tensor.reshape(shape), array.reshape(shape)
    if kind == "split":
        middle = draw(st.integers(0, length))
        pieces, arrays = tensor.split(axis, (middle, length - middle)), np.split(array, [middle], axis)
        swap = draw(st.sampled_from([1, -1]))
        return concat(pieces[::swap], axis), np.concatenate(arrays[::swap], axis)
    if kind == "stack" and tensor.size < 500:
        axis = draw(st.integers(0, tensor.ndim))
        return stack([tensor, tensor], axis), np.stack([array, array], axis)
    if kind == "unstack" and length:
        return (
            concat(tensor.unstack(axis), 0) if tensor.ndim > 1 else tensor,
            np.concatenate(list(np.moveaxis(array, axis, 0)), 0) if tensor.ndim > 1 else array,
        )
    if kind == "broadcast" and length == 1 and tensor.size < 500:
        size = draw(st.integers(0, 3))
        return tensor.broadcast(axis, size), np.repeat(array, size, axis)
    if kind == "cast" and tensor.dtype.is_float and not tensor.is_cast:
        dtype = draw(st.sampled_from([F32, BF16, F16]))
        return tensor.cast(dtype), array.astype(dtype.numpy)
    return tensor, array


def assert_equal(tensor: Tensor, array: Array, disk: Disk) -> None:
    assert tensor.shape == array.shape
    assert prod(tensor.grid) == tensor.size
    assert tuple(prod(group) for group in tensor.factors) == tensor.shape
    assembled = disk.assemble(tensor)
    assert assembled.dtype == array.dtype
    assert assembled.tobytes() == array.tobytes()


@settings(max_examples=400)
@given(st.data())
def test_any_program_equals_numpy(data: st.DataObject) -> None:
    disk = Disk()
    dtype = data.draw(st.sampled_from([F32, BF16, I16]))
    tensor, array = draw_tensor(data.draw, disk, data.draw(shapes()), dtype, "a")
    assert_equal(tensor, array, disk)
    for _ in range(data.draw(st.integers(1, 6))):
        tensor, array = apply_random(data.draw, tensor, array)
        assert_equal(tensor, array, disk)


@settings(max_examples=200)
@given(st.data())
def test_concat_of_tensors_with_different_pasts_equals_numpy(data: st.DataObject) -> None:
    """Each part is a refactored, transposed tensor of its own sharding; only the axis of the concatenation differs."""
    disk = Disk()
    shape = data.draw(shapes(1, 3))
    axis = data.draw(st.integers(0, len(shape) - 1))
    parts = []
    for number in range(data.draw(st.integers(1, 3))):
        own = (*shape[:axis], data.draw(st.integers(0, 6)), *shape[axis + 1 :])
        factors = [draw_factors(data.draw, size) or (1,) for size in own]
        order = [data.draw(st.permutations(range(len(group)))) for group in factors]
        # Stored with the factors of each axis permuted; put back by view, transpose, merge.
        stored, starts = [], []
        for group, places in zip(factors, order, strict=True):
            starts.append(len(stored))
            stored += [group[place] for place in places]
        tensor, array = draw_tensor(data.draw, disk, tuple(stored), F32, f"part{number}")
        back = [
            start + places.index(n) for start, places in zip(starts, order, strict=True) for n in range(len(places))
        ]
        tensor, array = tensor.transpose(back).reshape(own), array.transpose(back).reshape(own)
        assert_equal(tensor, array, disk)
        parts.append((tensor, array))
    joined = concat([tensor for tensor, _ in parts], axis)
    expected = np.concatenate([array for _, array in parts], axis)
    assert_equal(joined, expected, disk)
    tensor, array = apply_random(data.draw, joined, expected)
    assert_equal(tensor, array, disk)
