"""Which elements of a tensor a rank holds: the arithmetic of DTensor placements, as pure functions.

A rank's share of one tensor dimension is a list of runs: rows `start <= i < start + length` of the whole tensor, in the
order in which they lie in the local tensor. Every placement cuts that list further. The cut is always `torch.chunk`'s:
pieces of `ceil(length / count)` rows, so the last ones may be shorter or empty (torch
`distributed/tensor/placement_types.py`, `Shard._split_tensor`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple, TypeAlias

from unshard.tensors import Box

Runs: TypeAlias = tuple[tuple[int, int], ...]
"""(start, length) of rows of the whole tensor, in the order of the local tensor."""

ShardOrder: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]
"""(tensor dim, mesh dims in the order in which they cut it), as DTensorSpec records it from torch 2.10 on."""


class Placement(NamedTuple):
    """What one mesh dimension does to a tensor.

    `dim` is the tensor dimension that is cut, or None for Replicate. `split` is the `split_factor` of a _StridedShard:
    the number of pieces that the dimension was in before this mesh dimension cut each of them; 0 for a plain Shard.
    """

    dim: int | None
    split: int = 0

    def __str__(self) -> str:
        if self.dim is None:
            return "Replicate"
        return f"_StridedShard({self.dim}, {self.split})" if self.split else f"Shard({self.dim})"


class Share(NamedTuple):
    """What one rank holds of a tensor: `shape` of its local tensor, and (global box, local box) of its pieces."""

    shape: tuple[int, ...]
    pieces: tuple[tuple[Box, Box], ...]


REPLICATE = Placement(None)

_MAX_PIECES = 1 << 12
"""Of one tensor on one rank. FSDP2 on top of tensor parallelism leaves as many as the latter has ranks."""


def chunk(runs: Runs, count: int, index: int) -> Runs:
    """The `index`-th of `count` pieces of `runs`, by the rule of `torch.chunk`."""
    total = sum([length for _, length in runs])
    size = -(-total // count)
    low, high = min(index * size, total), min((index + 1) * size, total)
    return _cut(runs, low, high)


def strided_chunk(runs: Runs, split: int, count: int, index: int) -> Runs:
    """What a `_StridedShard` of `split` leaves: the `index`-th of `count` pieces of each of the `split` pieces.

    Raises ValueError where those are too many.
    """
    if split * len(runs) > _MAX_PIECES:
        raise ValueError(f"a _StridedShard of {split} cuts {len(runs)} pieces into too many")
    parts = [run for piece in range(split) for run in chunk(chunk(runs, split, piece), count, index)]
    return _joined(parts)


def cutting_order(placements: Sequence[Placement], mesh: Sequence[int], dim: int) -> tuple[int, ...] | None:
    """The mesh dimensions that cut tensor dimension `dim`, in the order in which they did.

    Plain Shards cut from left to right. A _StridedShard cut after the later mesh dimensions whose sizes make up its
    `split`: FSDP2 on top of tensor parallelism, where the right order is from right to left. None where no order fits
    the split factors; then the strided formula itself applies. (torch `_dtensor_spec.py`,
    `_maybe_convert_StridedShard_to_shard_order`.)
    """
    order: list[int] = []
    for axis in reversed(range(len(placements))):
        if placements[axis].dim != dim:
            continue
        wanted, pieces, place = placements[axis].split or 1, 1, 0
        while pieces != wanted and place < len(order):
            pieces *= mesh[order[place]]
            place += 1
        if pieces != wanted:
            return None
        order.insert(place, axis)
    return tuple(order)


def runs_of_dim(
    length: int,
    dim: int,
    placements: Sequence[Placement],
    mesh: Sequence[int],
    coordinate: Sequence[int],
    shard_order: Mapping[int, Sequence[int]] | None = None,
) -> Runs:
    """The runs of a tensor dimension of `length` that the rank at `coordinate` of the mesh holds.

    `shard_order` decides the order of plain Shards where it is recorded. It says nothing about _StridedShards: torch
    2.10 to 2.12 record the default order beside them, which is not the order of their data.
    """
    runs: Runs = ((0, length),) if length else ()
    cuts = [axis for axis, placement in enumerate(placements) if placement.dim == dim]
    if any(placements[axis].split > 1 for axis in cuts):
        order = cutting_order(placements, mesh, dim)
    else:
        order = tuple((shard_order or {}).get(dim, cuts))
    if order is None:
        for axis in cuts:
            runs = strided_chunk(runs, max(1, placements[axis].split), mesh[axis], coordinate[axis])
        return runs
    for axis in order:
        runs = chunk(runs, mesh[axis], coordinate[axis])
    return runs


@lru_cache(maxsize=256)
def share_of_rank(
    shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    mesh: tuple[int, ...],
    coordinate: tuple[int, ...],
    shard_order: ShardOrder | None = None,
) -> Share:
    """What the rank at `coordinate` of a mesh of sizes `mesh` holds of a tensor of the global `shape`.

    Negative dims count from the end. Raises ValueError for placements that do not fit the mesh or the shape.
    """
    if not len(placements) == len(mesh) == len(coordinate):
        raise ValueError(f"{len(placements)} placements on a mesh of {len(mesh)} dimensions at {coordinate}")
    if not all(0 <= place < size for place, size in zip(coordinate, mesh, strict=True)):
        raise ValueError(f"coordinate {coordinate} is outside a mesh of {mesh}")
    placed = tuple([_with_positive_dim(placement, len(shape)) for placement in placements])
    order = _checked_order(shard_order, placed)
    per_dim = [runs_of_dim(length, dim, placed, mesh, coordinate, order) for dim, length in enumerate(shape)]
    local = tuple([sum([length for _, length in runs]) for runs in per_dim])
    if 0 in local:
        return Share(local, ())
    if prod([len(runs) for runs in per_dim]) > _MAX_PIECES:
        raise ValueError(f"placements {[str(placement) for placement in placed]} cut {shape} into too many pieces")
    places = [_with_local_starts(runs) for runs in per_dim]
    pieces = [
        (
            Box(tuple([start for start, _, _ in part]), tuple([length for _, length, _ in part])),
            Box(tuple([here for _, _, here in part]), tuple([length for _, length, _ in part])),
        )
        for part in product(*places)
    ]
    return Share(local, tuple(pieces))


def _cut(runs: Runs, low: int, high: int) -> Runs:
    """The rows `low <= i < high`, counted along the runs."""
    parts: list[tuple[int, int]] = []
    passed = 0
    for start, length in runs:
        first, last = max(low, passed), min(high, passed + length)
        if first < last:
            parts.append((start + first - passed, last - first))
        passed += length
    return tuple(parts)


def _joined(runs: Sequence[tuple[int, int]]) -> Runs:
    """The same rows, with runs that follow each other made one."""
    parts: list[tuple[int, int]] = []
    for start, length in runs:
        if parts and sum(parts[-1]) == start:
            parts[-1] = (parts[-1][0], parts[-1][1] + length)
        else:
            parts.append((start, length))
    return tuple(parts)


def _with_local_starts(runs: Runs) -> list[tuple[int, int, int]]:
    """(start, length, start in the local tensor) of each run."""
    places: list[tuple[int, int, int]] = []
    here = 0
    for start, length in runs:
        places.append((start, length, here))
        here += length
    return places


def _with_positive_dim(placement: Placement, ndim: int) -> Placement:
    if placement.dim is None:
        return placement
    if not -ndim <= placement.dim < ndim:
        raise ValueError(f"{placement} does not fit a tensor of {ndim} dimensions")
    if placement.split > _MAX_PIECES:
        raise ValueError(f"{placement} cuts a tensor into too many pieces")
    return Placement(placement.dim % ndim, placement.split)


def _checked_order(order: ShardOrder | None, placements: Sequence[Placement]) -> dict[int, tuple[int, ...]]:
    """The shard order by tensor dimension. Raises ValueError where it names other mesh dims than the placements do."""
    orders = dict(order or ())
    for dim, axes in orders.items():
        cuts = [axis for axis, placement in enumerate(placements) if placement.dim == dim]
        if sorted(axes) != cuts:
            raise ValueError(f"shard order {axes} of dimension {dim} contradicts its placements on mesh dims {cuts}")
    return orders
