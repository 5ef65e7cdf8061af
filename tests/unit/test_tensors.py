"""What tensors refuse, and what they tell of themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unshard.dtypes import BF16, F16, F32, I32
from unshard.tensors import Box, Chunk, Computed, Extent, SourceFile, Tensor, concat, contiguous_chunk, stack

FILE = SourceFile("root", "folder/file.pt")


def whole(*shape: int, dtype=F32) -> Tensor:
    return Tensor("weight", dtype, shape, (contiguous_chunk(FILE, 64, shape, dtype, rank=3),))


def test_boxes_refuse_negative_and_unequal_lengths() -> None:
    with pytest.raises(ValueError, match="as many offsets as sizes"):
        Box((0,), (1, 2))
    with pytest.raises(ValueError, match="cannot be negative"):
        Box((-1,), (1,))
    with pytest.raises(ValueError, match="cannot be negative"):
        Box((1,), (-1,))


def test_boxes_are_told_as_slices() -> None:
    assert str(Box((0, 2), (4, 3))) == "[0:4, 2:5]"
    assert str(Box((), ())) == "[]"


def test_a_box_of_other_axes_does_not_fit() -> None:
    assert not Box((0,), (4,)).fits((4, 4))
    assert not Box((1, 0), (4, 4)).fits((4, 4))
    assert Box((4, 0), (0, 4)).fits((4, 4))


@pytest.mark.parametrize(
    ("sizes", "strides", "expected"),
    [
        ((2, 3), (12, 4), True),
        ((2, 3), (16, 4), False),
        ((1, 3), (999, 4), True),
        ((2, 1), (4, 999), True),
        ((0, 3), (999, 999), True),
        ((3,), (0,), False),
        ((), (), True),
    ],
)
def test_contiguity_ignores_axes_of_one_element(sizes, strides, expected) -> None:
    assert Extent(FILE, 0, strides, F32).is_contiguous(sizes) is expected


def test_a_chunk_is_cropped_where_its_bytes_are() -> None:
    chunk = Chunk(Box((10, 20), (4, 6)), Extent(FILE, 100, (24, 4), F32), 1)
    cropped = chunk.crop(Box((12, 21), (2, 3)))
    assert cropped == Chunk(Box((12, 21), (2, 3)), Extent(FILE, 100 + 2 * 24 + 4, (24, 4), F32), 1)
    assert cropped.size_in_bytes == 24
    assert chunk.crop(chunk.box).extent is chunk.extent


@pytest.mark.parametrize(
    "act",
    [
        lambda t: t.slice(0, 0, 2, 0),
        lambda t: t.slice(0, -1, 2),
        lambda t: t.slice(2, 0, 1),
        lambda t: t.slice(-3, 0, 1),
        lambda t: t.select(0, 4),
        lambda t: t.select(0, -1),
        lambda t: t.split(0, [1, 2]),
        lambda t: t.transpose((0, 0)),
        lambda t: t.transpose((0,)),
        lambda t: t.reshape((4, 7)),
        lambda t: t.broadcast(0, 3),
        lambda t: t.cast(I32),
        lambda t: t.cast(BF16).cast(F16),
        lambda t: replace(t, dtype=I32).cast(F32),
        lambda t: replace(t, factors=((4,),)),
        lambda t: concat([t, whole(4, 5)]),
        lambda t: concat([t, whole(4, 6, dtype=BF16)]),
        lambda t: concat([t, t], 2),
        lambda t: stack([t, whole(4, 5)]),
    ],
)
def test_what_cannot_be_is_refused_by_name(act) -> None:
    with pytest.raises(ValueError, match="weight: "):
        act(whole(4, 6))


def test_computed_tensors_are_cast_between_floats_only() -> None:
    computed = Computed("weight", F32, (4, 6), "fuse", {}, (whole(4, 6),), (0,))
    assert computed.cast(BF16).size_in_bytes == 48
    with pytest.raises(ValueError, match="weight: cannot cast"):
        computed.cast(I32)


def test_a_cast_to_the_own_type_is_none() -> None:
    tensor = whole(4, 6)
    assert tensor.cast(F32) is tensor
    assert tensor.cast(BF16).is_cast
    assert not tensor.is_cast
    assert tensor.cast(BF16).size_in_bytes == tensor.size_in_bytes // 2


def test_a_cast_after_a_widening_starts_from_what_is_stored() -> None:
    tensor = whole(4, 6, dtype=BF16)
    widened = tensor.cast(F32)
    assert widened.cast(BF16) == tensor
    assert widened.cast(F16).chunks == tensor.chunks
    with pytest.raises(ValueError, match="weight: cannot cast BF16 to F16"):
        whole(4, 6).cast(BF16).cast(F16)
    with pytest.raises(ValueError, match="weight: cannot cast F16 to BF16"):
        tensor.cast(F16).cast(BF16)


def test_operations_keep_rank_and_file() -> None:
    tensor = whole(4, 6).slice(0, 1, 3).transpose().reshape((12,))
    assert {(chunk.rank, chunk.extent.file) for chunk in tensor.chunks} == {(3, FILE)}
    assert str(FILE) == "folder/file.pt"


def test_an_empty_piece_stays_empty_when_its_axis_goes() -> None:
    """A rank without rows saved [0, 6]; a reshape or a broadcast must not make elements of it."""
    full = contiguous_chunk(FILE, 0, (1, 1), F32, rank=0)
    empty = Chunk(Box((1, 0), (0, 1)), Extent(FILE, 4, (4, 4), F32), 1)
    tensor = Tensor("weight", F32, (1, 1), (full, empty))
    assert [chunk.rank for chunk in tensor.reshape(()).chunks] == [0]
    assert [chunk.rank for chunk in tensor.broadcast(0, 5).chunks] == [0]


def test_a_split_of_unlike_factors_does_not_make_a_box_per_row() -> None:
    """Rows seen as [64, 2] and swapped, beside plain rows: their factors are refined, not multiplied out."""
    swapped = whole(128, 4).reshape((2, 64, 4)).transpose((1, 0, 2)).reshape((128, 4))
    assert len(concat([swapped, whole(128, 4)]).chunks) == 2


def test_factors_that_do_not_divide_each_other_are_multiplied_out() -> None:
    swapped = whole(6, 4).reshape((2, 3, 4)).transpose((1, 0, 2)).reshape((6, 4))
    joined = concat([swapped, whole(5, 4)])
    assert joined.factors == ((11,), (4,))
    assert len(joined.chunks) == 4


def test_replicas_that_lie_differently_are_cut_alike() -> None:
    """One rank saved a transposed copy: both must stay replicas, box by box."""
    plain = contiguous_chunk(FILE, 0, (2, 3), F32, rank=0)
    turned = Chunk(plain.box, Extent(FILE, 24, (4, 8), F32), 1)
    merged = Tensor("weight", F32, (2, 3), (plain, turned)).reshape((6,)).slice(0, 1, 5)
    boxes = [{chunk.box for chunk in merged.chunks if chunk.rank == rank} for rank in (0, 1)]
    assert boxes[0] == boxes[1]
