"""Pieces whose recorded boxes are wrong: FSDP2 above tensor parallelism, where a length does not divide evenly.

The placements are `(_StridedShard(axis, split_factor=tp), Shard(axis))` on a mesh (fsdp, tp). What lies in the file was
cut by tensor parallelism first and by FSDP then, each time by the rule of torch.chunk. What is recorded follows the
placements from left to right, and differs for some lengths (torch 2.13, `distributed/tensor/_utils.py`): 7 rows on a
mesh of 3 x 2 are the smallest case. A mesh explains a tensor only if, for every piece that was written, one rule gives
exactly what is recorded and the other exactly the size that is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from unshard.tensors import Box

LARGEST_WORLD, LARGEST_TP = 1 << 16, 64
"""Ranks, and ranks that share a layer. Where there are more, nothing is settled."""

Run: TypeAlias = tuple[int, int]
"""A start and a length along an axis."""


@dataclass(frozen=True, slots=True)
class Written:
    """A piece: who wrote it, the box that was recorded, and the shape of what is in the file."""

    rank: int
    recorded: Box
    sizes: tuple[int, ...]


def settle(
    shape: tuple[int, ...], pieces: Sequence[Written], world: int, *, sizes_recorded: bool = True
) -> list[Box] | None:
    """The true boxes of a tensor's pieces, if there is a mesh that explains them and no other that says otherwise.

    sizes_recorded: False where only the offsets of `Written.recorded` were recorded, and its sizes are those stored.
    """
    found: set[tuple[Box, ...]] = set()
    for axis in range(len(shape)):
        if all(_is_whole_but(axis, shape, piece) for piece in pieces):
            for fsdp, tp in _meshes(world):
                boxes = _explain(axis, shape[axis], pieces, (fsdp, tp), sizes_recorded)
                if boxes is not None:
                    found.add(tuple(boxes))
    return list(found.pop()) if len(found) == 1 else None


def _is_whole_but(axis: int, shape: tuple[int, ...], piece: Written) -> bool:
    """Whether a piece is cut along no other axis. What is in the file may have other axes altogether."""
    return len(piece.sizes) == len(shape) and all(
        other == axis
        or (piece.recorded.offsets[other] == 0 and piece.recorded.sizes[other] == piece.sizes[other] == size)
        for other, size in enumerate(shape)
    )


@cache
def _meshes(world: int) -> tuple[tuple[int, int], ...]:
    """The meshes (fsdp, tp) of a world, or of the replicas into which it falls."""
    ranks = [count for count in range(4, min(world, LARGEST_WORLD) + 1) if world % count == 0]
    columns = range(2, LARGEST_TP + 1)
    return tuple([(count // tp, tp) for count in ranks for tp in columns if count % tp == 0 and count > tp])


def _explain(
    axis: int, length: int, pieces: Sequence[Written], mesh: tuple[int, int], sizes_recorded: bool
) -> list[Box] | None:
    fsdp, tp = mesh
    boxes = []
    for piece in pieces:
        row, column = divmod(piece.rank % (fsdp * tp), tp)
        start, size = _stored_run(length, fsdp, tp, row, column)
        run = _recorded_run(length, fsdp, tp, row, column)
        recorded = piece.recorded.offsets[axis], piece.recorded.sizes[axis] if sizes_recorded else run[1]
        if size != piece.sizes[axis] or recorded != run:
            return None
        offsets = list(piece.recorded.offsets)
        offsets[axis] = start
        boxes.append(Box(tuple(offsets), piece.sizes))
    return boxes


def _stored_run(length: int, fsdp: int, tp: int, row: int, column: int) -> Run:
    """What rank (row, column) holds: the piece of its column, cut among the rows."""
    runs = _cut(_cut([(0, length)], tp, column), fsdp, row)
    return runs[0] if runs else (length, 0)


def _recorded_run(length: int, fsdp: int, tp: int, row: int, column: int) -> Run:
    """What torch records for it: the pieces of its row of all columns, one after the other, cut among the columns."""
    strided = [run for piece in range(tp) for run in _cut(_cut([(0, length)], tp, piece), fsdp, row)]
    runs = _cut(strided, tp, column)
    return (runs[0][0] if runs else length), sum([size for _, size in runs])


def _cut(runs: Sequence[Run], parts: int, index: int) -> list[Run]:
    """The piece `index` of torch.chunk over what the runs hold one after the other."""
    total = sum([size for _, size in runs])
    step = -(-total // parts)
    low, high = index * step, (index + 1) * step
    cut, place = [], 0
    for start, size in runs:
        first, last = max(low, place), min(high, place + size)
        if first < last:
            cut.append((start + first - place, last - first))
        place += size
    return cut
