"""Affine maps: which block of a parameter each tensor-parallel rank holds, as DeepSpeed records since 0.19.8.

A parameter has a map, `{logical_shape, ranks: {rank: {shard_shape, pieces}}}`, with a list of pieces
`{shape, source, dest, scale}`. A piece has the same elements on both sides: `source` is where they lie in the whole
parameter, `dest` where in the rank's shard, each as `[offset, strides]` in elements of a dense row-major tensor.
Source: DeepSpeed `checkpoint/affine.py`.

All maps that DeepSpeed makes are of blocks along one axis, whose strides are those of the whole and of the shard; other
strides are refused. So is a piece with a scale: its elements would have to be computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from unshard.checkpoint import Shape
from unshard.tensors import Box, Tensor, concat, row_major_strides

VERSION = 1
_MOST_PIECES = 1 << 12


def join_pieces(recorded: object, shards: Sequence[Tensor]) -> Tensor:
    """The whole parameter from its shards in the order of ranks; blocks that several ranks hold are replicas.

    Raises ValueError where the map is malformed, contradicts the shards, or scales.
    """
    name = shards[0].name
    shape = _shape(_entry(recorded, "logical_shape", name), name)
    ranks = _entry(recorded, "ranks", name)
    blocks = []
    for rank, shard in enumerate(shards):
        held = ranks.get(rank, ranks.get(str(rank))) if isinstance(ranks, Mapping) else None
        expected = _shape(_entry(held, "shard_shape", name), name)
        if shard.shape != expected:
            raise ValueError(f"{name}: rank {rank} holds {list(shard.shape)}, but its affine map says {list(expected)}")
        pieces = _entry(held, "pieces", name)
        if not isinstance(pieces, (list, tuple)) or len(pieces) > _MOST_PIECES:
            raise ValueError(f"{name}: its affine map has no list of at most {_MOST_PIECES:,} pieces")
        blocks += [block for piece in pieces if (block := _place(piece, shard, shape)) is not None]
    if not blocks:
        return replace(shards[0], shape=shape, chunks=(), factors=())
    if any(block.factors != blocks[0].factors or block.dtype != blocks[0].dtype for block in blocks):
        raise ValueError(f"{name}: the ranks' shards differ in type, or were made in different ways")
    return replace(blocks[0], chunks=tuple([chunk for block in blocks for chunk in block.chunks]))


def _place(piece: object, shard: Tensor, shape: Shape) -> Tensor | None:
    """A piece of a shard where it belongs in a tensor of `shape` that has nothing else; None if it has no elements."""
    name = shard.name
    if isinstance(piece, Mapping) and piece.get("scale", 1) != 1:
        raise ValueError(f"{name}: ranks hold it multiplied by {piece['scale']!r}, which would have to be undone")
    sizes = _shape(_entry(piece, "shape", name), name)
    source = _block(_entry(piece, "source", name), sizes, shape, name)
    local = _block(_entry(piece, "dest", name), sizes, shard.shape, name)
    if not source.volume:
        return None
    block = shard
    for axis, (start, size) in enumerate(zip(local.offsets, sizes, strict=True)):
        block = block.slice(axis, start, start + size)
    for axis, (start, size) in enumerate(zip(source.offsets, sizes, strict=True)):
        before, after = (_nothing(block, axis, size) for size in (start, shape[axis] - start - size))
        block = concat([before, block, after], axis)
    return block


def _nothing(block: Tensor, axis: int, size: int) -> Tensor:
    """A tensor without chunks beside a block, of another size along one axis."""
    return Tensor(block.name, block.dtype, (*block.shape[:axis], size, *block.shape[axis + 1 :]), ())


def _block(view: object, sizes: Shape, shape: Shape, name: str) -> Box:
    """The box of a tensor of `shape` that a strided view of its memory covers. Raises ValueError where it is none."""
    if not (isinstance(view, Sequence) and len(view) == 2 and type(view[0]) is int):
        raise ValueError(f"{name}: its affine map has a piece without offset and strides")
    offset, strides = view[0], _shape(view[1], name)
    dense = row_major_strides(shape)
    same = [own == needed for own, needed, size in zip(strides, dense, sizes, strict=False) if size > 1]
    if len(sizes) != len(shape) or len(strides) != len(shape) or not all(same):
        raise ValueError(f"{name}: its affine map has a piece that is no block of {list(shape)}")
    offsets, rest = [], offset
    for stride in dense:
        place, rest = divmod(rest, stride) if stride else (0, rest)
        offsets.append(place)
    if 0 not in sizes and (offset < 0 or rest or any(a + n > m for a, n, m in zip(offsets, sizes, shape, strict=True))):
        raise ValueError(f"{name}: its affine map has a piece that lies outside {list(shape)}")
    return Box(tuple(offsets), sizes)


def _entry(recorded: object, key: str, name: str) -> Any:
    if not isinstance(recorded, Mapping) or key not in recorded:
        raise ValueError(f"{name}: its affine map lacks `{key}`")
    return recorded[key]


def _shape(value: object, name: str) -> Shape:
    if not isinstance(value, (list, tuple)) or not all(type(size) is int and size >= 0 for size in value):
        raise ValueError(f"{name}: its affine map has {value!r} where sizes should be")
    return tuple(value)
