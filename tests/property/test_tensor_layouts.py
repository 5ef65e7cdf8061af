"""The re-layouts that checkpoints need, on any sharding: right, and carried by a few boxes for each chunk.

The bounds do not depend on the number of rows: `_SIZE` makes a box per row, or per head, break them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import Array, Disk, shard
from unshard.dtypes import F32
from unshard.tensors import Box, Tensor, concat, contiguous_chunk, flat_range_boxes, stack

_SIZE = 24
"""Heads, experts or rows per block: far more than any bound below allows boxes for each chunk."""


def ordinal(*shape: int) -> Array:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def cut_axis(shape: Sequence[int], axis: int, cuts: Sequence[int]) -> list[Box]:
    """Boxes along one axis, cut at these positions; uneven and empty as they come."""
    bounds = [0, *sorted(cut % (shape[axis] + 1) for cut in cuts), shape[axis]]
    return [
        Box((*[0] * axis, low, *[0] * (len(shape) - axis - 1)), (*shape[:axis], high - low, *shape[axis + 1 :]))
        for low, high in itertools.pairwise(bounds)
    ]


def cut_flat(shape: Sequence[int], cuts: Sequence[int]) -> list[list[Box]]:
    """The boxes of consecutive flat ranges, as ZeRO and flat parameters cut a tensor."""
    size = int(np.prod(shape))
    bounds = [0, *sorted(cut % (size + 1) for cut in cuts), size]
    return [list(flat_range_boxes(shape, low, high)) for low, high in itertools.pairwise(bounds)]


def check(tensor: Tensor, expected: Array, disk: Disk, bound: int) -> None:
    assert disk.assemble(tensor).tobytes() == expected.tobytes()
    assert tensor.shape == expected.shape
    assert len(tensor.chunks) <= bound


cuts = st.lists(st.integers(0, 1 << 20), max_size=5)
axes = st.integers(0, 1)


@settings(max_examples=60)
@given(cuts, axes)
def test_grouped_qkv_is_taken_apart_and_put_together(cuts: list[int], axis: int) -> None:
    groups, queries, dim, width = _SIZE, 4, 6, 3
    array, disk = ordinal(groups * (queries + 2) * dim, width), Disk()
    pieces = cut_axis(array.shape, axis, cuts)
    fused = shard(disk, "qkv", array, F32, pieces)
    view, seen = fused.reshape((groups, queries + 2, dim, width)), array.reshape(groups, queries + 2, dim, width)
    parts = [(0, queries), (queries, queries + 1), (queries + 1, queries + 2)]
    split = []
    for start, stop in parts:
        part = view.slice(1, start, stop).reshape((groups * (stop - start) * dim, width))
        check(part, seen[:, start:stop].reshape(-1, width), disk, 5 * len(pieces))
        split.append(part)
    together = concat(
        [part.reshape((groups, stop - start, dim, width)) for part, (start, stop) in zip(split, parts, strict=True)], 1
    )
    check(together.reshape(array.shape), array, disk, 15 * len(pieces))


@settings(max_examples=60)
@given(st.tuples(cuts, cuts, cuts))
def test_separate_query_key_value_are_grouped(cuts: tuple[list[int], ...]) -> None:
    """Each of the three has a sharding of its own."""
    groups, queries, dim, width = _SIZE, 4, 6, 3
    disk, views, arrays, pieces = Disk(), [], [], 0
    for name, heads, own in zip("qkv", (queries, 1, 1), cuts, strict=True):
        array = ordinal(groups * heads * dim, width) + 10_000 * len(arrays)
        boxes = cut_axis(array.shape, 0, own)
        pieces += len(boxes)
        views.append(shard(disk, name, array, F32, boxes).reshape((groups, heads, dim, width)))
        arrays.append(array.reshape(groups, heads, dim, width))
    fused = concat(views, 1).reshape((groups * (queries + 2) * dim, width))
    check(fused, np.concatenate(arrays, 1).reshape(-1, width), disk, 5 * pieces)


@settings(max_examples=60)
@given(cuts, axes)
def test_gate_and_up_of_each_tensor_parallel_rank(cuts: list[int], axis: int) -> None:
    ranks, rows, width = 4, _SIZE, 5
    array, disk = ordinal(ranks * 2 * rows, width), Disk()
    pieces = cut_axis(array.shape, axis, cuts)
    view = shard(disk, "fc1", array, F32, pieces).reshape((ranks, 2, rows, width))
    gate, up = (view.select(1, number).reshape((ranks * rows, width)) for number in range(2))
    seen = array.reshape(ranks, 2, rows, width)
    check(gate, seen[:, 0].reshape(-1, width), disk, 5 * len(pieces))
    check(up, seen[:, 1].reshape(-1, width), disk, 5 * len(pieces))
    back = stack([part.reshape((ranks, rows, width)) for part in (gate, up)], 1)
    check(back.reshape(array.shape), array, disk, 10 * len(pieces))


def permute_rotary(tensor: Tensor, heads: int, outer: int) -> Tensor:
    """Rows of each head seen as [outer, rest] and transposed."""
    rows, width = tensor.shape
    view = tensor.reshape((heads, outer, rows // heads // outer, width))
    return view.transpose((0, 2, 1, 3)).reshape((rows, width))


@settings(max_examples=60)
@given(cuts, axes)
def test_rotary_permutation_and_back(cuts: list[int], axis: int) -> None:
    heads, half, width = _SIZE, _SIZE, 2
    array, disk = ordinal(heads * 2 * half, width), Disk()
    pieces = cut_axis(array.shape, axis, cuts)
    stored = shard(disk, "q", array, F32, pieces)
    permuted = permute_rotary(stored, heads, half)
    expected = array.reshape(heads, half, 2, width).swapaxes(1, 2).reshape(array.shape)
    check(permuted, expected, disk, 5 * len(pieces))
    check(permute_rotary(permuted, heads, 2), array, disk, 5 * len(pieces))


@pytest.mark.parametrize("outer", [2, _SIZE])
@settings(max_examples=60)
@given(query_cuts=cuts, value_cuts=cuts, axis=axes)
def test_permuted_and_plain_heads_are_grouped(
    outer: int, query_cuts: list[int], value_cuts: list[int], axis: int
) -> None:
    """A rotary permutation of some heads only: the factors of the parts differ and must meet without boxes per row."""
    heads, half, width = _SIZE, _SIZE, 2
    disk, shape = Disk(), (heads * 2 * half, width)
    queries, values = ordinal(*shape), -1 - ordinal(*shape)
    query_boxes, value_boxes = cut_axis(shape, axis, query_cuts), cut_axis(shape, axis, value_cuts)
    permuted = permute_rotary(shard(disk, "q", queries, F32, query_boxes), heads, outer)
    plain = shard(disk, "v", values, F32, value_boxes)
    fused = concat([part.reshape((heads, 1, 2 * half, width)) for part in (permuted, plain)], 1)
    expected = np.stack(
        [
            queries.reshape(heads, outer, 2 * half // outer, width).swapaxes(1, 2).reshape(heads, 2 * half, width),
            values.reshape(heads, 2 * half, width),
        ],
        1,
    )
    check(fused, expected, disk, 5 * (len(query_boxes) + len(value_boxes)))


@settings(max_examples=60)
@given(cuts, axes)
def test_interleaved_columns_are_taken_apart_and_put_together(cuts: list[int], axis: int) -> None:
    array, disk = ordinal(7, 2 * _SIZE), Disk()
    pieces = cut_axis(array.shape, axis, cuts)
    stored = shard(disk, "gate_up", array, F32, pieces)
    even, odd = stored.slice(1, 0, 2 * _SIZE, 2), stored.slice(1, 1, 2 * _SIZE, 2)
    check(even, array[:, ::2], disk, len(pieces))
    check(odd, array[:, 1::2], disk, len(pieces))
    check(stack([even, odd], 2).reshape(array.shape), array, disk, 2 * len(pieces))


@settings(max_examples=60)
@given(cuts)
def test_memory_of_grouped_experts_is_reinterpreted(cuts: list[int]) -> None:
    """A parameter [hidden, experts x inner] whose memory is that of [experts, hidden, inner]; cut flat."""
    experts, hidden, inner = 5, _SIZE, 2 * _SIZE
    array, disk = ordinal(hidden, experts * inner), Disk()
    ranges = cut_flat(array.shape, cuts)
    flat = shard(disk, "weight1", array, F32, [box for boxes in ranges for box in boxes])
    seen = flat.reshape((experts, hidden, inner)).transpose()
    check(seen, array.reshape(experts, hidden, inner).swapaxes(1, 2), disk, 9 * len(ranges))
    whole = Tensor(
        "weight1", F32, array.shape, (contiguous_chunk(disk.save(array, F32, "whole").file, 0, array.shape, F32),)
    )
    assert len(whole.reshape((experts, hidden, inner)).chunks) == 1


@pytest.mark.parametrize("axis", [0, 1, 2])
@settings(max_examples=30)
@given(cuts=cuts)
def test_packed_experts_are_taken_apart_and_put_together(axis: int, cuts: list[int]) -> None:
    experts, inner, hidden = 6, _SIZE, 5
    array, disk = ordinal(experts, 2 * inner, hidden), Disk()
    pieces = cut_axis(array.shape, axis, cuts)
    packed = shard(disk, "gate_up_proj", array, F32, pieces)
    halves = []
    for number, expert in enumerate(packed.unstack()):
        gate, up = expert.split(0, [inner, inner])
        check(gate, array[number, :inner], disk, len(pieces))
        check(up.transpose(), array[number, inner:].T, disk, len(pieces))
        halves.append(concat([gate, up], 0))
    check(stack(halves), array, disk, 2 * experts * len(pieces))
