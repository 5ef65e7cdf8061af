"""The proof that chunks make up a tensor: each element is stored, and by one piece only, or replicas of it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from unshard.errors import IncompleteError, UnshardError
from unshard.plan.partition import find_faults
from unshard.tensors import Box, Chunk, Tensor
from unshard.words import items_in_words, ranks_in_words

_LISTED = 3
"""How many holes, overlaps or pieces one message names."""


def primary_chunks(tensor: Tensor) -> tuple[Chunk, ...]:
    """One chunk per distinct box, ordered by box: of replicas the lowest rank's, but rather one that lies in the same
    file as the chunk before it. Empty chunks are left out.
    """
    replicas = group_replicas(tensor)
    if len(replicas) == len(tensor.chunks):
        return tuple([chunk for (chunk,) in replicas])
    primary: list[Chunk] = []
    for group in replicas:
        near = [chunk for chunk in group if primary and chunk.extent.file == primary[-1].extent.file]
        primary.append((near or group)[0])
    return tuple(primary)


def group_replicas(tensor: Tensor) -> list[list[Chunk]]:
    """The chunks that are not empty, by box; boxes in order, the replicas of each by rank."""
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Chunk]] = {}
    for chunk in tensor.chunks:
        box = chunk.box
        if 0 not in box.sizes:
            groups.setdefault((box.offsets, box.sizes), []).append(chunk)
    ordered = [groups[key] for key in sorted(groups)]
    for group in ordered:
        if len(group) > 1:
            group.sort(key=_rank)
    return ordered


def prove_coverage(tensor: Tensor) -> list[UnshardError]:
    """All reasons why the chunks are not exactly this tensor; an empty list is the proof.

    Found are holes, overlaps (boxes that intersect and are not the same), boxes outside the shape, and pieces stored in
    different types. Each error is an IncompleteError that names the tensor, ranks, boxes and files.
    """
    problems: list[UnshardError] = []
    pieces = [group[0] for group in group_replicas(tensor)]
    grid = tensor.grid
    outside = [chunk for chunk in pieces if not chunk.box.fits(grid)]
    if outside:
        problems.append(_outside(tensor, outside))
        pieces = [chunk for chunk in pieces if chunk.box.fits(grid)]
    if any(chunk.extent.dtype is not tensor.chunks[0].extent.dtype for chunk in tensor.chunks):
        problems += _unequal_dtypes(tensor)
    if tensor.size == 0:
        return problems
    faults = find_faults(Box.whole(grid), pieces, _LISTED)
    if faults.overlaps:
        problems.append(_overlaps(tensor, faults.overlaps))
    if faults.holes:
        missing = None if faults.overlaps else tensor.size - sum([prod(chunk.box.sizes) for chunk in pieces])
        problems.append(_holes(tensor, sorted(faults.holes, key=lambda box: box.offsets), missing))
    return problems


def describe_box(tensor: Tensor, box: Box) -> str:
    """A box of the grid in the coordinates of the public shape; in those of the grid where it is no box there."""
    offsets, sizes, place = [], [], 0
    for group in tensor.factors:
        end = place + len(group)
        flat = _flat_range(group, box.offsets[place:end], box.sizes[place:end])
        if flat is None:
            return f"{box} of the grid {list(tensor.grid)}"
        offsets.append(flat[0])
        sizes.append(flat[1])
        place = end
    return str(Box(tuple(offsets), tuple(sizes))) if sizes else "the only element"


def describe_source(chunk: Chunk) -> str:
    """Who saved a chunk, and where: "rank 3 (model_rank_3.pt)"."""
    return str(chunk.extent.file) if chunk.rank is None else f"rank {chunk.rank} ({chunk.extent.file})"


def _rank(chunk: Chunk) -> int:
    return -1 if chunk.rank is None else chunk.rank


def _flat_range(group: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> tuple[int, int] | None:
    """The offset and size on the product of grid axes of a box that is one run of it; None if it is several."""
    start, length, inner_is_whole = 0, 1, True
    for size, offset, count in zip(group, offsets, sizes, strict=True):
        start = start * size + offset
        if length > 1 and count != size:
            inner_is_whole = False
        length *= count
    return (start, length) if inner_is_whole else None


def _title(tensor: Tensor) -> str:
    return f"{tensor.name} ({tensor.dtype}, shape {list(tensor.shape)})"


def _outside(tensor: Tensor, chunks: Sequence[Chunk]) -> IncompleteError:
    found = [f"{describe_source(chunk)} has {chunk.box}" for chunk in chunks]
    return IncompleteError(
        f"{_title(tensor)}: pieces lie outside the shape{_on_grid(tensor)}: {items_in_words(found, _LISTED)}",
        hint="the ranks disagree on the shape; are all files of one checkpoint? unshard inspect DIR",
    )


def _on_grid(tensor: Tensor) -> str:
    return "" if tensor.grid == tensor.shape else f", seen as {list(tensor.grid)}"


def _unequal_dtypes(tensor: Tensor) -> list[UnshardError]:
    first: dict[str, Chunk] = {}
    for chunk in tensor.chunks:
        first.setdefault(chunk.extent.dtype.name, chunk)
    if len(first) < 2:
        return []
    found = [f"{dtype} in {describe_source(chunk)}" for dtype, chunk in first.items()]
    return [
        IncompleteError(
            f"{_title(tensor)}: its pieces are stored in different types: {', '.join(found)}",
            hint="are all files of one checkpoint? unshard inspect DIR",
        )
    ]


def _overlaps(tensor: Tensor, pairs: Sequence[tuple[Chunk, Chunk]]) -> IncompleteError:
    found = []
    for left, right in pairs:
        common = left.box.intersect(right.box)
        where = describe_box(tensor, common) if common else "nothing"
        found.append(
            f"{where} is in {describe_box(tensor, left.box)} of {describe_source(left)}"
            f" and in {describe_box(tensor, right.box)} of {describe_source(right)}"
        )
    return IncompleteError(
        f"{_title(tensor)}: pieces overlap: {items_in_words(found, _LISTED)}",
        hint="files of different checkpoints or world sizes may be mixed: unshard inspect DIR",
    )


def _holes(tensor: Tensor, holes: Sequence[Box], missing: int | None) -> IncompleteError:
    found = [describe_box(tensor, box) for box in holes[:_LISTED]]
    amount = ""
    if missing is not None:
        more = ", and more" if missing > sum([box.volume for box in holes[:_LISTED]]) else ""
        amount = f"{more} ({missing} of {tensor.size} elements)"
    return IncompleteError(
        f"{_title(tensor)}: no piece holds {', '.join(found)}{amount}; {_sources(tensor.chunks)}",
        hint="if the files of the other ranks lie elsewhere, add their folder: --also DIR",
    )


def _sources(chunks: Sequence[Chunk]) -> str:
    """Where the pieces that exist come from."""
    if not chunks:
        return "there are no pieces of it at all"
    files = list(dict.fromkeys([str(chunk.extent.file) for chunk in chunks]))
    ranks = sorted({chunk.rank for chunk in chunks if chunk.rank is not None})
    of = f"{ranks_in_words(ranks)} in " if ranks else ""
    return f"pieces found: {of}{items_in_words(files, _LISTED)}"
