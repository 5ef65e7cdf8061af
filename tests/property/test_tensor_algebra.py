"""assemble(transform(chunks)) == transform(assemble(chunks)), for any sharding and any program of operations."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from drawing import apply_random, assert_equal, draw_factors, draw_tensor, shapes
from reference import Disk
from unshard.dtypes import BF16, F32, I16
from unshard.tensors import concat


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
def test_unstack_is_select_at_every_index(data: st.DataObject) -> None:
    """On axes of one and of several factors, and after operations that leave chunks strided."""
    disk = Disk()
    tensor, array = draw_tensor(data.draw, disk, data.draw(shapes(1)), F32, "a")
    for _ in range(data.draw(st.integers(0, 3))):
        tensor, array = apply_random(data.draw, tensor, array)
    if not tensor.shape:
        return
    axis = data.draw(st.integers(-tensor.ndim, tensor.ndim - 1))
    parts = tensor.unstack(axis)
    assert parts == tuple([tensor.select(axis, index) for index in range(tensor.shape[axis])])
    for index, part in enumerate(parts):
        assert_equal(part, array.take(index, axis), disk)
        assert len(part.chunks) <= len(tensor.chunks)


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
