"""Holes, overlaps, pieces outside, unequal types and replicas: found, named, and found fast."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from time import perf_counter

import pytest

from unshard.dtypes import BF16, F32, DType
from unshard.errors import IncompleteError
from unshard.plan.coverage import describe_box, primary_chunks, prove_coverage
from unshard.plan.partition import find_faults
from unshard.plan.replicas import replica_claims
from unshard.tensors import Box, Chunk, Extent, SourceFile, Tensor, row_major_strides


def piece(
    offsets: Sequence[int],
    sizes: Sequence[int],
    rank: int | None = 0,
    *,
    dtype: DType = F32,
    at: int = 0,
    file: str = "",
) -> Chunk:
    source = SourceFile("root", file or f"rank_{rank}.pt")
    extent = Extent(source, at, row_major_strides(sizes, dtype.itemsize), dtype)
    return Chunk(Box(tuple(offsets), tuple(sizes)), extent, rank)


def tensor(shape: Sequence[int], *chunks: Chunk) -> Tensor:
    return Tensor("layers.0.weight", F32, tuple(shape), chunks)


def pinwheels(side: int) -> list[Chunk]:
    """Blocks of 3 x 3 that no straight cut divides, shifted row by row so that no cut divides the whole either."""
    boxes = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    return [
        piece((3 * row + low, 3 * column + left), sizes, row * side + column)
        for row, column in product(range(side), repeat=2)
        for (low, left), sizes in boxes
    ]


def only_problem(found: Tensor) -> str:
    (problem,) = prove_coverage(found)
    assert isinstance(problem, IncompleteError)
    assert problem.hint
    assert "layers.0.weight (F32, shape" in problem.message
    return problem.message


@pytest.mark.parametrize(
    "whole",
    [
        tensor((8, 4), piece((0, 0), (5, 4), 0), piece((5, 0), (3, 4), 1)),
        tensor((8, 4), piece((0, 0), (8, 1), 0), piece((0, 1), (8, 3), 1)),
        tensor((8, 4), piece((0, 0), (8, 4), 0), piece((8, 0), (0, 4), 1)),
        tensor((8, 4), piece((0, 0), (8, 4), 0), piece((0, 0), (8, 4), 1)),
        tensor((), piece((), (), 0), piece((), (), 1)),
        tensor((0, 4)),
        tensor((0, 4), piece((0, 0), (0, 4))),
        tensor((3, 3), *pinwheels(1)),
    ],
    ids=["rows", "columns", "empty-shard", "replicas", "scalar", "no-elements", "empty-only", "pinwheel"],
)
def test_what_covers_is_proven(whole: Tensor) -> None:
    assert prove_coverage(whole) == []


def test_a_missing_rank_is_a_hole_named_by_its_box() -> None:
    message = only_problem(tensor((8, 4), piece((0, 0), (2, 4), 0), piece((2, 0), (2, 4), 1), piece((6, 0), (2, 4), 3)))
    assert "no piece holds [4:6, 0:4] (8 of 32 elements)" in message
    assert "pieces found: ranks 0-1, 3 in rank_0.pt, rank_1.pt, rank_3.pt" in message


def test_a_tensor_without_pieces_is_one_hole() -> None:
    assert "no piece holds [0:8, 0:4] (32 of 32 elements); there are no pieces of it" in only_problem(tensor((8, 4)))
    assert "no piece holds the only element" in only_problem(tensor(()))


def test_few_of_many_holes_are_listed() -> None:
    message = only_problem(tensor((40,), *[piece((2 * n,), (1,), n) for n in range(20)]))
    assert "no piece holds [1:2], [3:4], [5:6], and more (20 of 40 elements)" in message


def test_an_overlap_names_both_pieces_their_ranks_and_files() -> None:
    message = only_problem(tensor((8, 4), piece((0, 0), (5, 4), 0), piece((4, 0), (4, 4), 1)))
    assert "[4:5, 0:4] is in [0:5, 0:4] of rank 0 (rank_0.pt) and in [4:8, 0:4] of rank 1 (rank_1.pt)" in message


def test_a_hole_and_an_overlap_are_both_told() -> None:
    found = prove_coverage(tensor((20,), piece((0,), (6,), 0), piece((5,), (5,), 1), piece((15,), (5,), 2)))
    assert sorted(problem.message.split(": ")[1].split(" ")[0] for problem in found) == ["no", "pieces"]


def test_ranks_that_disagree_on_the_shape() -> None:
    message = only_problem(tensor((8, 4), piece((0, 0), (8, 4), 0), piece((8, 0), (2, 4), 1)))
    assert "outside the shape: rank 1 (rank_1.pt) has [8:10, 0:4]" in message
    assert "rank 2" in only_problem(tensor((8, 4), piece((0, 0), (8, 4), 0), piece((0,), (8,), 2)))


def test_pieces_of_unequal_types() -> None:
    message = only_problem(tensor((8,), piece((0,), (4,), 0), piece((4,), (4,), 1, dtype=BF16)))
    assert "F32 in rank 0 (rank_0.pt), BF16 in rank 1 (rank_1.pt)" in message


def test_a_replica_of_another_type_is_found_too() -> None:
    assert "different types" in only_problem(tensor((8,), piece((0,), (8,), 0), piece((0,), (8,), 1, dtype=BF16)))


def test_boxes_are_told_in_the_public_shape_where_they_are_boxes_there() -> None:
    grouped = Tensor("w", F32, (24, 5), (), ((4, 2, 3), (5,)))
    assert describe_box(grouped, Box((1, 0, 0, 0), (2, 2, 3, 5))) == "[6:18, 0:5]"
    assert describe_box(grouped, Box((1, 1, 1, 2), (1, 1, 2, 1))) == "[10:12, 2:3]"
    assert describe_box(grouped, Box((1, 1, 0, 0), (2, 1, 3, 5))) == "[1:3, 1:2, 0:3, 0:5] of the grid [4, 2, 3, 5]"


def test_primary_chunks_are_of_the_lowest_rank_or_of_the_file_before() -> None:
    chunks = [piece((row, 0), (2, 4), rank, file=f"f{rank}") for row in (2, 0) for rank in (3, 1, 2)]
    assert [chunk.rank for chunk in primary_chunks(tensor((4, 4), *chunks))] == [1, 1]
    spread = [piece((0,), (2,), 4, file="b"), piece((2,), (2,), 1, file="a"), piece((2,), (2,), 5, file="b")]
    assert [chunk.rank for chunk in primary_chunks(tensor((4,), *spread))] == [4, 5]
    unranked = [piece((0,), (4,), 0), piece((0,), (4,), None), piece((4,), (0,), 2)]
    assert [chunk.rank for chunk in primary_chunks(tensor((4,), *unranked))] == [None]


def test_replicas_are_claimed_equal() -> None:
    replicated = tensor((4, 2), *[piece((row, 0), (2, 2), rank, at=8) for rank, row in enumerate((0, 2, 0, 2))])
    first, second = replica_claims([replicated])
    assert first.message == (
        "layers.0.weight: rank 2 (rank_2.pt) differs from rank 0 (rank_0.pt) in [0:2, 0:2],"
        " of which both hold a replica"
    )
    assert [claim.left.chunks[0].rank for claim in (first, second)] == [0, 1]
    assert [claim.right.chunks[0].rank for claim in (first, second)] == [2, 3]
    assert first.right.shape == (2, 2)
    assert prove_coverage(first.right) == prove_coverage(second.left) == []


def test_the_same_bytes_need_no_claim() -> None:
    assert replica_claims([tensor((4,), piece((0,), (4,)), piece((0,), (4,)))]) == ()
    assert replica_claims([tensor((4,), piece((0,), (4,)))]) == ()


def test_thousands_of_tangled_chunks_take_no_quadratic_time() -> None:
    chunks = pinwheels(40)
    spiral = []
    low, high = 0, 4000
    while low < high:  # rows and columns peeled off in turn: cuts nested 2000 deep
        spiral += [piece((low, low), (1, high - low)), piece((low + 1, low), (high - low - 1, 1))]
        low += 1
    started = perf_counter()
    assert find_faults(Box.whole((120, 120)), chunks, 3).holes == []
    faults = find_faults(Box.whole((4000, 4000)), spiral[:-1], 3)
    assert (faults.holes, faults.overlaps) == ([], [])
    assert perf_counter() - started < 10


def test_thousands_of_overlapping_chunks_stop_early() -> None:
    nested = [piece((0, n), (8000 - n, 8000 - 2 * n)) for n in range(3000)]
    started = perf_counter()
    assert len(find_faults(Box.whole((8000, 8000)), nested, 3).overlaps) >= 3
    assert perf_counter() - started < 10


def test_faults_are_those_of_a_bitmap() -> None:
    """Random boxes, some of them tiling, against counting every element."""
    rng = random.Random(5)
    kinds = set()
    for _ in range(300):
        shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 3)))
        count = rng.choice([1, 2, 4, 30])
        boxes = set()
        for _ in range(count):
            offsets = tuple(rng.randrange(size) for size in shape)
            boxes.add(Box(offsets, tuple(rng.randint(1, size - low) for low, size in zip(offsets, shape, strict=True))))
        chunks = [piece(box.offsets, box.sizes, number) for number, box in enumerate(boxes)]
        times = dict.fromkeys(product(*map(range, shape)), 0)
        for box in boxes:
            for index in product(*map(range, box.offsets, box.stops)):
                times[index] += 1
        faults = find_faults(Box.whole(shape), chunks, 1000)
        holes = [index for box in faults.holes for index in product(*map(range, box.offsets, box.stops))]
        assert sorted(holes) == [index for index, number in times.items() if number == 0]
        assert bool(faults.overlaps) == any(number > 1 for number in times.values())
        assert all(left.box.intersect(right.box) for left, right in faults.overlaps)
        kinds.add((bool(holes), bool(faults.overlaps)))
    assert len(kinds) == 4
