"""The laws of boxes, against sets of indices."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from unshard.tensors import Box, flat_range_boxes, row_major_strides

Index = tuple[int, ...]


def indices(box: Box) -> set[Index]:
    return set(product(*[range(start, stop) for start, stop in zip(box.offsets, box.stops, strict=True)]))


def boxes(ndim: int) -> st.SearchStrategy[Box]:
    numbers = st.tuples(*[st.integers(0, 4)] * ndim)
    return st.builds(Box, numbers, numbers)


pairs = st.integers(0, 3).flatmap(lambda ndim: st.tuples(boxes(ndim), boxes(ndim)))
shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(pairs)
def test_intersection_holds_the_common_elements(pair: tuple[Box, Box]) -> None:
    left, right = pair
    common = left.intersect(right)
    assert common == right.intersect(left)
    assert (indices(common) if common else set()) == indices(left) & indices(right)


@given(pairs)
def test_difference_is_disjoint_and_complete(pair: tuple[Box, Box]) -> None:
    left, right = pair
    rest = left.subtract(right)
    assert sum(box.volume for box in rest) == len(indices(left) - indices(right))
    assert set().union(*[indices(box) for box in rest]) == indices(left) - indices(right)
    assert len(rest) <= max(1, 2 * len(left.sizes))


@given(pairs)
def test_translation_and_its_inverse(pair: tuple[Box, Box]) -> None:
    box, by = pair
    moved = box.translate(by.offsets)
    assert moved.relative_to(by.offsets) == box
    assert indices(moved) == {tuple(np.add(index, by.offsets)) for index in indices(box)}


@given(pairs)
def test_a_box_fits_where_its_elements_do(pair: tuple[Box, Box]) -> None:
    box, shape = pair
    if box.volume:
        assert box.fits(shape.sizes) == (indices(box) <= indices(Box.whole(shape.sizes)))


@settings(max_examples=200)
@given(shapes, st.integers(0, 700), st.integers(0, 700))
def test_a_flat_range_is_few_boxes_in_row_major_order(shape: tuple[int, ...], start: int, stop: int) -> None:
    size = int(np.prod(shape))
    start, stop = min(start, size), min(stop, size)
    pieces = list(flat_range_boxes(shape, start, stop))
    flat = np.arange(size).reshape(shape)
    found = [flat[tuple(map(slice, box.offsets, box.stops))].reshape(-1) for box in pieces]
    assert np.concatenate([np.zeros(0, int), *found]).tolist() == list(range(start, stop))
    assert len(pieces) <= max(1, 2 * len(shape) - 1)


@given(shapes, st.integers(1, 8))
def test_row_major_strides_are_those_of_numpy(shape: tuple[int, ...], itemsize: int) -> None:
    assert row_major_strides(shape, itemsize) == np.zeros(shape, f"V{itemsize}").strides
