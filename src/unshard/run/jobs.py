"""What a worker thread does in one go: a span of a file, small enough that stopping and progress are prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from unshard.dtypes import DType
from unshard.files import DECODING, OpenFiles
from unshard.plan.moves import Compute, Copy, Literal, PlannedFile, Tile
from unshard.run.bands import is_crossed, pieces_by_band, split_bands, split_evenly
from unshard.run.copying import Copier
from unshard.run.results import Rounding
from unshard.run.threads import Budget
from unshard.run.writing import Output
from unshard.settings import Settings
from unshard.tensors import Box, Chunk, row_major_strides

if TYPE_CHECKING:
    from unshard.run.computing import Operands
    from unshard.run.gathering import Gatherer

_LONGEST_COPY = 8 << 20
"""Bytes of one job that copies."""


@dataclass(slots=True)
class Worker:
    """What one thread has of its own: buffers that it uses again and again, and what it has counted so far."""

    files: OpenFiles
    copier: Copier
    settings: Settings
    budget: Budget
    rounded: dict[str, Rounding] = field(default_factory=dict)
    operands: Operands | None = None
    _gatherer: Gatherer | None = None
    _band: bytearray = field(default_factory=bytearray)

    @property
    def gatherer(self) -> Gatherer:
        """Made on first use: a run that only copies never loads numpy."""
        from unshard.run.gathering import Gatherer

        if self._gatherer is None:
            self._gatherer = Gatherer(self.files, self.settings.buffer)
        return self._gatherer

    def band(self, size: int) -> memoryview:
        """A buffer of `size` bytes that holds until the next call."""
        if len(self._band) < size:
            self._band = bytearray(size)
        return memoryview(self._band)[:size]

    def count(self, name: str, rounding: Rounding) -> None:
        """Add to what became of a tensor."""
        if rounding.elements:
            self.rounded[name] = self.rounded.get(name, Rounding()) + rounding


@dataclass(frozen=True, slots=True)
class WriteLiteral:
    """Bytes known in advance."""

    move: Literal

    @property
    def size(self) -> int:
        return self.move.size

    def run(self, _worker: Worker, output: Output) -> None:
        output.write(self.move.destination, self.move.data)


@dataclass(frozen=True, slots=True)
class CopySpan:
    """A part of a copy."""

    move: Copy
    start: int
    size: int

    def run(self, worker: Worker, output: Output) -> None:
        move = self.move
        output.copy(worker.copier, move.file, move.offset + self.start, move.destination + self.start, self.size)


@dataclass(frozen=True, slots=True)
class GatherBand:
    """A band of a tile, with the pieces that lie in it. `memory` is what its buffers take, in bytes."""

    tile: Tile
    box: Box
    pieces: tuple[Chunk, ...]
    memory: int

    @property
    def size(self) -> int:
        return self.box.volume * self.tile.dtype.itemsize

    def run(self, worker: Worker, output: Output) -> None:
        start = _offset_in(self.tile.shape, self.box, self.tile.dtype)
        with worker.budget.reserve(self.memory):
            buffer = worker.band(self.size)
            if all(self._is_run(piece) for piece in self.pieces):
                self._read_runs(worker, buffer)
            else:
                self._gather(worker, buffer)
            output.write(self.tile.destination + start, buffer)

    def _is_run(self, piece: Chunk) -> bool:
        """Whether a piece is one run of bytes in its file and in the band, and the same bytes in both."""
        dtype, sizes, extent = self.tile.dtype, piece.box.sizes, piece.extent
        if extent.dtype != dtype or not extent.is_contiguous(sizes):
            return False
        band = replace(extent, strides=row_major_strides(self.box.sizes, dtype.itemsize))
        return band.is_contiguous(sizes)

    def _read_runs(self, worker: Worker, buffer: memoryview) -> None:
        """Without numpy: short tensors of row shards are such tiles, and in many a plan the only ones."""
        for piece in self.pieces:
            start = _offset_in(self.box.sizes, piece.box.relative_to(self.box.offsets), self.tile.dtype)
            part = buffer[start : start + piece.size_in_bytes]
            worker.files.read_into(piece.extent.file, piece.extent.offset, part)

    def _gather(self, worker: Worker, buffer: memoryview) -> None:
        import numpy as np

        from unshard.run.casting import raw_dtype

        dtype = self.tile.dtype
        band = np.frombuffer(buffer, raw_dtype(dtype)).reshape(self.box.sizes)
        worker.count(self.tile.name, worker.gatherer.gather(self.pieces, self.box, band, dtype))


@dataclass(frozen=True, slots=True)
class ComputeBand:
    """The rows `start <= row < stop` of a computed tensor."""

    move: Compute
    start: int
    stop: int
    memory: int

    @property
    def size(self) -> int:
        rows = self.move.shape[0] if self.move.shape else 1
        return self.move.size // rows * (self.stop - self.start)

    def run(self, worker: Worker, output: Output) -> None:
        from unshard.run.computing import Operands

        with worker.budget.reserve(self.memory):
            if worker.operands is None or worker.operands.move is not self.move:
                worker.operands = None
                worker.operands = Operands(self.move, worker.gatherer)
            band, rounding = worker.operands.compute(self.start, self.stop)
            worker.count(self.move.name, rounding)
            offset = self.size // max(1, self.stop - self.start) * self.start
            output.write(self.move.destination + offset, band.reshape(-1).view("u1").data)


Job: TypeAlias = WriteLiteral | CopySpan | GatherBand | ComputeBand


def list_jobs(file: PlannedFile, settings: Settings) -> Iterator[Job]:
    """The jobs of a file in the order of their destinations, made as they are asked for."""
    for move in file.moves:
        if isinstance(move, Literal):
            yield WriteLiteral(move)
        elif isinstance(move, Copy):
            for start, stop in split_evenly(move.size, _LONGEST_COPY):
                yield CopySpan(move, start, stop - start)
        elif isinstance(move, Tile):
            yield from _cut_tile(move, settings)
        else:
            yield from _cut_compute(move)


def _offset_in(shape: Sequence[int], box: Box, dtype: DType) -> int:
    """Bytes from the start of a row-major array of this shape to the first element of a box."""
    strides = row_major_strides(shape, dtype.itemsize)
    return sum([at * stride for at, stride in zip(box.offsets, strides, strict=True)])


def _cut_tile(tile: Tile, settings: Settings) -> Iterator[GatherBand]:
    """Bands of one buffer; of a larger one where a file keeps its elements across them, as a transpose does.

    There each band reads a short run of every row of the source, and the fewer bands, the longer the runs.
    """
    size = settings.buffer
    if any(is_crossed(piece) for piece in tile.pieces):
        size = max(size, settings.memory // (2 * settings.jobs))
    widest = max([tile.dtype.itemsize, *[piece.extent.dtype.itemsize for piece in tile.pieces]])
    bands = split_bands(tile.shape, size // widest)
    beside = settings.buffer + (DECODING if any(piece.extent.file.encoded for piece in tile.pieces) else 0)
    for box, pieces in pieces_by_band(tile.pieces, bands):
        yield GatherBand(tile, box, pieces, beside + box.volume * tile.dtype.itemsize)


def _cut_compute(move: Compute) -> Iterator[ComputeBand]:
    from unshard.run.computing import memory_of_rows
    from unshard.run.functions import split_rows

    if move.size == 0:
        return
    for start, stop in split_rows(move.function, move.shape, [operand.banded for operand in move.operands]):
        yield ComputeBand(move, start, stop, memory_of_rows(move, stop - start))
