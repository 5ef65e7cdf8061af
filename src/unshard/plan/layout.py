"""How one tensor becomes moves.

The tensor is cut into contiguous spans of the output: along its outermost axis, at the positions that no chunk
straddles, and along the next axis where a span is one element thick. A chunk that fills a span as one run of bytes is
copied, and so are the long runs of strided chunks; everything else is gathered in tiles. A strided span keeps the grid
as the shape of its tile; runs that are gathered, because they are short or must be cast, make a tile of one axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TypeAlias

from unshard.dtypes import DType
from unshard.plan.coverage import primary_chunks
from unshard.plan.moves import Copy, Move, Tile
from unshard.plan.partition import cut, narrow
from unshard.tensors import Box, Chunk, Extent, Tensor, row_major_strides

LONG_RUN = 1 << 20
"""Bytes. The runs of strided chunks are copied one by one from this length on; shorter ones are gathered faster."""

SHORT_RUN = 16 << 10
"""Bytes. Neighbouring runs shorter than this are gathered: a system call costs as much as copying some 64 KiB."""

TILE_SIZE = 1 << 20
"""Bytes. Neighbouring spans share a tile up to this size; the tile of a single span may be larger."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Elements that follow each other in the output, from element `start` on, and in the file, from `extent` on."""

    start: int
    count: int
    extent: Extent
    rank: int | None

    def is_continued_by(self, other: _Run) -> bool:
        """Whether the other run, the next in the output, is the next in the file too."""
        here, there = self.extent, other.extent
        return here.offset + self.count * here.dtype.itemsize == there.offset and here.file == there.file


_Span: TypeAlias = _Run | Tile


def lay_out_tensor(tensor: Tensor, destination: int) -> list[Move]:
    """The moves that write a tensor row-major from byte `destination` on. Its coverage must be proven."""
    if tensor.size == 0:
        return []
    chunks = primary_chunks(tensor)
    dtype = tensor.dtype
    stored = all(chunk.extent.dtype is dtype or chunk.extent.dtype == dtype for chunk in chunks)
    layout = _Layout(tensor.name, dtype, tensor.grid, row_major_strides(tensor.grid), destination, stored)
    return list(layout.settle(layout.spans(Box.whole(tensor.grid), chunks)))


@dataclass(frozen=True, slots=True)
class _Layout:
    """A tensor on its way to `destination`. `strides` are the grid's, in elements.

    stored: no chunk is stored in another type, so that chunks may be copied.
    """

    name: str
    dtype: DType
    grid: tuple[int, ...]
    strides: tuple[int, ...]
    destination: int
    stored: bool

    # -- spans ---------------------------------------------------------------------------------------------------------

    def spans(self, region: Box, chunks: Sequence[Chunk], axis: int = 0) -> Iterator[_Span]:
        """The spans of a region, in order. Along the axes before `axis` it has one element; the chunks tile it."""
        while axis < len(self.grid) and region.sizes[axis] == 1:
            axis += 1
        if axis == len(self.grid):
            yield from self.runs(chunks) or (self.tile(region, chunks),)
            return
        for start, stop, members in cut(chunks, axis):
            runs = self.runs(members)
            if runs:
                yield from runs
                continue
            part = narrow(region, axis, start, stop)
            if len(members) > 1 and stop - start == 1:
                yield from self.spans(part, members, axis + 1)
            else:
                yield self.tile(part, members)

    def tile(self, region: Box, chunks: Sequence[Chunk]) -> Tile:
        pieces = [Chunk(chunk.box.relative_to(region.offsets), chunk.extent, chunk.rank) for chunk in chunks]
        destination = self.destination + self.position(region.offsets) * self.dtype.itemsize
        return Tile(destination, self.dtype, region.sizes, tuple(pieces), self.name)

    def runs(self, chunks: Sequence[Chunk]) -> list[_Run]:
        """The runs of the chunks that tile a span; none where the span is better gathered."""
        runs: list[_Run] = []
        for chunk in chunks:
            if chunk.extent.file.encoded is not None:
                return []
            axis, count = self.run_of(chunk)
            if len(chunks) == 1 and count == prod(chunk.box.sizes):
                return [_Run(self.position(chunk.box.offsets), count, chunk.extent, chunk.rank)]
            if not self.stored or count * self.dtype.itemsize < LONG_RUN:
                return []
            runs += self.long_runs(chunk, axis, count)
        return sorted(runs, key=lambda run: run.start)

    def run_of(self, chunk: Chunk) -> tuple[int, int]:
        """The longest run of a chunk, in the output and in the file: the axis on which it begins and its elements."""
        count, itemsize, sizes, strides = 1, chunk.extent.dtype.itemsize, chunk.box.sizes, chunk.extent.strides
        for axis in range(len(sizes) - 1, -1, -1):
            size = sizes[axis]
            if size > 1 and strides[axis] != itemsize * count:
                return axis + 1, count
            count *= size
            if size != self.grid[axis]:
                return axis, count
        return 0, count

    def long_runs(self, chunk: Chunk, axis: int, count: int) -> Iterator[_Run]:
        """The runs of `count` elements that begin on `axis`, one for each index of the axes before it."""
        extent, start = chunk.extent, self.position(chunk.box.offsets)
        for outer in product(*[range(size) for size in chunk.box.sizes[:axis]]):
            shift = sum([index * stride for index, stride in zip(outer, extent.strides[:axis], strict=True)])
            where = sum([index * stride for index, stride in zip(outer, self.strides[:axis], strict=True)])
            moved = Extent(extent.file, extent.offset + shift, extent.strides, extent.dtype)
            yield _Run(start + where, count, moved, chunk.rank)

    def position(self, offsets: tuple[int, ...]) -> int:
        """The element of the output at a place of the grid."""
        return sum([offset * stride for offset, stride in zip(offsets, self.strides, strict=True)])

    # -- moves ---------------------------------------------------------------------------------------------------------

    def settle(self, spans: Iterable[_Span]) -> Iterator[Move]:
        """The moves of consecutive spans: runs that continue each other are one, small neighbours are gathered."""
        pending: list[_Span] = []
        pending_size = 0
        for span in _join(spans):
            size = span.size if isinstance(span, Tile) else span.count * self.dtype.itemsize
            is_copied = self.stored and isinstance(span, _Run) and size >= SHORT_RUN
            if pending and (is_copied or pending_size + size > TILE_SIZE or not _are_alike(pending[-1], span)):
                yield self.move(pending)
                pending, pending_size = [], 0
            if is_copied:
                yield self.move([span])
            else:
                pending.append(span)
                pending_size += size
        if pending:
            yield self.move(pending)

    def move(self, spans: Sequence[_Span]) -> Move:
        """One move for neighbouring spans that are alike."""
        tiles = [span for span in spans if isinstance(span, Tile)]
        runs = [span for span in spans if isinstance(span, _Run)]
        return _join_tiles(tiles) if tiles else self.move_runs(runs)

    def move_runs(self, runs: Sequence[_Run]) -> Move:
        """A copy, or a tile of one axis."""
        first, size = runs[0], self.dtype.itemsize
        destination = self.destination + first.start * size
        if len(runs) == 1 and self.stored:
            return Copy(destination, first.count * size, first.extent.file, first.extent.offset)
        pieces = []
        for run in runs:
            extent = run.extent
            line = Extent(extent.file, extent.offset, (extent.dtype.itemsize,), extent.dtype)
            pieces.append(Chunk(Box((run.start - first.start,), (run.count,)), line, run.rank))
        count = sum([run.count for run in runs])
        return Tile(destination, self.dtype, (count,), tuple(pieces), self.name)


def _are_alike(left: _Span, right: _Span) -> bool:
    """Whether neighbouring spans fit in one tile: runs, or tiles that differ in their first axis only."""
    if isinstance(left, Tile) and isinstance(right, Tile):
        return left.shape[1:] == right.shape[1:]
    return isinstance(left, _Run) and isinstance(right, _Run)


def _join_tiles(tiles: Sequence[Tile]) -> Tile:
    """Tiles one behind the other along their first axis."""
    first = tiles[0]
    if len(tiles) == 1:
        return first
    pieces: list[Chunk] = []
    rows = 0
    for tile in tiles:
        by = (rows, *[0] * (len(first.shape) - 1))
        pieces += [Chunk(chunk.box.translate(by), chunk.extent, chunk.rank) for chunk in tile.pieces]
        rows += tile.shape[0]
    return Tile(first.destination, first.dtype, (rows, *first.shape[1:]), tuple(pieces), first.name)


def _join(spans: Iterable[_Span]) -> Iterator[_Span]:
    """The spans with runs that continue each other, in the output and in the file, made one."""
    last: _Span | None = None
    for span in spans:
        if isinstance(span, _Run) and isinstance(last, _Run) and last.is_continued_by(span):
            last = _Run(last.start, last.count + span.count, last.extent, last.rank)
        else:
            if last is not None:
                yield last
            last = span
    if last is not None:
        yield last
