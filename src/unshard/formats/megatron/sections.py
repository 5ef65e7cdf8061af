"""Shards of tensor-parallel ranks joined to full tensors.

A fused matrix is cut by ranks inside each of its sections: rank r of T holds the r-th T-th of the gates, then the r-th
T-th of the ups, … Joined, each section is whole before the next begins. Sources: Megatron-LM
`megatron/core/transformer/mlp.py` (gate and up), `megatron/core/ssm/gated_delta_net.py`, `…/mamba_mixer.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unshard.tensors import Tensor, concat


def join_replicas(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors that hold the same values as one, whose chunks are replicas of each other.

    Raises ValueError where their shapes or types differ.
    """
    first, *others = tensors
    if not others:
        return first
    if any((other.shape, other.dtype) != (first.shape, first.dtype) for other in others):
        raise ValueError(f"{first.name}: replicas differ: {[(str(t.dtype), t.shape) for t in tensors]}")
    if any(other.factors != first.factors for other in others):
        raise ValueError(f"{first.name}: replicas are made in different ways")
    return replace(first, chunks=tuple([chunk for tensor in tensors for chunk in tensor.chunks]))


def join_along(shards: Sequence[Tensor], axis: int) -> Tensor:
    """The shards of all ranks, in the order of ranks, one behind the other along an axis."""
    return concat(shards, axis) if len(shards) > 1 else shards[0]


def join_sections(
    shards: Sequence[Tensor], axis: int, sizes: Sequence[int], counts: Sequence[int] | None = None
) -> Tensor:
    """The shards of all ranks with each section whole; `sizes` are those of the sections in one shard.

    counts: of how many ranks each shard is, where some stand for several. Raises ValueError where the sizes do not add
    up to the shards' axis.
    """
    if len(shards) == 1:
        return shards[0]
    counts = counts or [1] * len(shards)
    split = [shard.split(axis, [size * count for size in sizes]) for shard, count in zip(shards, counts, strict=True)]
    return concat([parts[section] for section in range(len(sizes)) for parts in split], axis)


def join_gated(shards: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Shards of [gate; up] as all gates, then all ups. Raises ValueError where a shard has no two halves."""
    half, odd = divmod(shards[0].shape[axis], 2)
    if odd:
        raise ValueError(f"{shards[0].name}: {shards[0].shape[axis]} rows are no gate and up")
    return join_sections(shards, axis, (half, half))


def delta_net_sizes(rows: int, values: int, heads: int) -> tuple[int, ...]:
    """Sections [query; key; value; z; beta; alpha] of a gated delta net's `in_proj` of so many rows.

    values: rows of the value section (columns of `out_proj`); heads: value heads (rows of `A_log`). Raises ValueError
    where that leaves no equal query and key.
    """
    return (*_equal_pair(rows, 2 * values + 2 * heads), values, values, heads, heads)


def delta_net_convolution_sizes(channels: int, values: int) -> tuple[int, ...]:
    """Sections [query; key; value] of its `conv1d`."""
    return (*_equal_pair(channels, values), values)


def mamba_sizes(rows: int, inner: int, heads: int) -> tuple[int, ...]:
    """Sections [z; x; B; C; dt] of a Mamba mixer's `in_proj`; inner: columns of `out_proj`, heads: rows of `A_log`."""
    return (inner, inner, *_equal_pair(rows, 2 * inner + heads), heads)


def mamba_convolution_sizes(channels: int, inner: int) -> tuple[int, ...]:
    """Sections [x; B; C] of its `conv1d`."""
    return (inner, *_equal_pair(channels, inner))


def _equal_pair(total: int, others: int) -> tuple[int, int]:
    """Two equal sections that are left of `total` beside `others`."""
    half, odd = divmod(total - others, 2)
    if half < 1 or odd:
        raise ValueError(f"{total} rows minus {others} are no two equal sections")
    return half, half
