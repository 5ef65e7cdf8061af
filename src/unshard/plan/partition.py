"""Boxes that should tile a region: where they can be cut apart, what they leave open, which of them overlap.

Real shardings fall apart along one axis after another, at positions that no box straddles, and so are checked in
O(n log n). Tangled ones (pinwheels, hostile headers) are halved at median boundaries until few boxes are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import prod
from operator import itemgetter

from unshard.tensors import Box, Chunk

_FEW = 8
"""So many boxes are compared pair by pair."""

_DEEPEST_CUT = 64
"""Cuts nested deeper than this peel off box after box, as in a spiral; halving is faster."""


def cut(chunks: Sequence[Chunk], axis: int) -> list[tuple[int, int, list[Chunk]]]:
    """The chunks grouped along an axis at the positions that none of them straddles: (start, stop, members), in order.

    Between the stop of one group and the start of the next lies nothing.
    """
    ordered = sorted([(chunk.box.offsets[axis], chunk.box.sizes[axis], chunk) for chunk in chunks], key=itemgetter(0))
    groups: list[tuple[int, int, list[Chunk]]] = []
    first = stop = 0
    members: list[Chunk] = []
    for start, size, chunk in ordered:
        if members and start >= stop:
            groups.append((first, stop, members))
            members = []
        if not members:
            first = stop = start
        members.append(chunk)
        stop = max(stop, start + size)
    if members:
        groups.append((first, stop, members))
    return groups


def narrow(region: Box, axis: int, start: int, stop: int) -> Box:
    """The region between two positions of one axis."""
    return Box(
        (*region.offsets[:axis], start, *region.offsets[axis + 1 :]),
        (*region.sizes[:axis], stop - start, *region.sizes[axis + 1 :]),
    )


@dataclass(slots=True)
class Faults:
    """What keeps chunks from tiling a region; each list ends soon after its limit, for people read only a few."""

    limit: int
    holes: list[Box] = field(default_factory=list)
    overlaps: list[tuple[Chunk, Chunk]] = field(default_factory=list)

    @property
    def are_many(self) -> bool:
        return len(self.holes) >= self.limit or len(self.overlaps) >= self.limit


def find_faults(region: Box, chunks: Sequence[Chunk], limit: int) -> Faults:
    """Holes and overlaps of chunks inside a region. No two of the chunks have the same box, and none is empty."""
    faults = Faults(limit)
    pending: list[tuple[Box, Sequence[Chunk], int]] = [(region, chunks, 0)]
    while pending and not faults.are_many:
        region, chunks, depth = pending.pop()
        if len(chunks) < 2:
            faults.holes += region.subtract(chunks[0].box) if chunks else [region]
        elif depth > _DEEPEST_CUT:
            _halve(region, chunks, faults)
        else:
            parts = _cut_apart(region, chunks)
            if parts is None:
                _halve(region, chunks, faults)
            else:
                pending += [(part, members, depth + 1) for part, members in reversed(parts)]
    return faults


def _cut_apart(region: Box, chunks: Sequence[Chunk]) -> list[tuple[Box, Sequence[Chunk]]] | None:
    """What is still to be looked at after a cut along the first axis that allows one; None if no axis does."""
    for axis, (low, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
        groups = cut(chunks, axis)
        if len(groups) == 1 and groups[0][:2] == (low, low + size):
            continue
        volume = region.volume // size
        parts: list[tuple[Box, Sequence[Chunk]]] = []
        position = low
        for start, stop, members in groups:
            if position < start:
                parts.append((narrow(region, axis, position, start), ()))
            if len(members) > 1 or prod(members[0].box.sizes) != volume * (stop - start):
                parts.append((narrow(region, axis, start, stop), members))
            position = stop
        if position < low + size:
            parts.append((narrow(region, axis, position, low + size), ()))
        return parts
    return None


def _halve(region: Box, chunks: Sequence[Chunk], faults: Faults) -> None:
    """Find the faults of tangled chunks, which may reach beyond their part of the region."""
    seen: set[tuple[Box, Box]] = set()
    pending = [(region, list(chunks))]
    while pending and not faults.are_many:
        region, members = pending.pop()
        halves = _split_at_median(region, members) if len(members) > _FEW else None
        if halves is not None:
            pending += reversed(halves)
            continue
        open_boxes = [region]
        for chunk in members:
            open_boxes = [rest for box in open_boxes for rest in box.subtract(chunk.box)]
        faults.holes += open_boxes
        for left, right in combinations(members, 2):
            common = left.box.intersect(right.box)
            if common and common.intersect(region) and (left.box, right.box) not in seen:
                seen.add((left.box, right.box))
                faults.overlaps.append((left, right))
            if len(faults.overlaps) >= faults.limit:
                return


def _split_at_median(region: Box, chunks: Sequence[Chunk]) -> list[tuple[Box, list[Chunk]]] | None:
    """Two halves of a region, cut at the median of the boundaries inside it, on the axis where fewest chunks straddle.

    None where no boundary lies inside: then every chunk covers the whole region.
    """
    best: tuple[int, int, int] | None = None
    for axis, (low, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
        starts = [chunk.box.offsets[axis] for chunk in chunks]
        stops = [chunk.box.offsets[axis] + chunk.box.sizes[axis] for chunk in chunks]
        inside = sorted([position for position in (*starts, *stops) if low < position < low + size])
        if inside:
            middle = inside[len(inside) // 2]
            straddling = sum(start < middle < stop for start, stop in zip(starts, stops, strict=True))
            best = min(best or (straddling, axis, middle), (straddling, axis, middle))
    if best is None:
        return None
    _, axis, middle = best
    low, stop = region.offsets[axis], region.offsets[axis] + region.sizes[axis]
    return [
        (narrow(region, axis, low, middle), [c for c in chunks if c.box.offsets[axis] < middle]),
        (narrow(region, axis, middle, stop), [c for c in chunks if c.box.offsets[axis] + c.box.sizes[axis] > middle]),
    ]
