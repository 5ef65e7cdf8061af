"""Random tensors and random operations on them, for hypothesis, beside the arrays they stand for."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from hypothesis import strategies as st

from reference import Array, Disk, cut_randomly
from unshard.dtypes import BF16, F16, F32, DType
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
