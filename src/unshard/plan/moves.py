"""The plan: every byte of every output file, written exactly once. A value: print it, save it, run it elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypeAlias

from unshard.dtypes import DType
from unshard.target import Claim, Seal
from unshard.tensors import Chunk, SourceFile


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes known in advance."""

    destination: int
    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Copy:
    """One contiguous span of a source file to one contiguous span of the output, byte for byte."""

    destination: int
    size: int
    file: SourceFile
    offset: int


@dataclass(frozen=True, slots=True)
class Tile:
    """A contiguous span of the output gathered from strided, transposed, decoded or cast pieces.

    `shape` is the row-major grid of the span in elements of `dtype`; the pieces' boxes lie on it and tile it exactly.
    `name` is the output tensor, for messages.
    """

    destination: int
    dtype: DType
    shape: tuple[int, ...]
    pieces: tuple[Chunk, ...]
    name: str

    @property
    def size(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Operand:
    """One input of a Compute: a grid with its pieces; see `tensors.Computed` for `banded`.

    `shape` is the public shape and `grid` the row-major refinement on which the pieces' boxes lie.
    """

    dtype: DType
    shape: tuple[int, ...]
    grid: tuple[int, ...]
    pieces: tuple[Chunk, ...]
    banded: int | None


@dataclass(frozen=True, slots=True)
class Compute:
    """A contiguous span of the output computed by a registered pure function."""

    destination: int
    dtype: DType
    shape: tuple[int, ...]
    function: str
    parameters: Mapping[str, object]
    operands: tuple[Operand, ...]
    name: str

    @property
    def size(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


Move: TypeAlias = Literal | Copy | Tile | Compute


def pieces_of(move: Move) -> Iterator[Chunk]:
    """The pieces that a move gathers."""
    if isinstance(move, Tile):
        yield from move.pieces
    elif isinstance(move, Compute):
        for operand in move.operands:
            yield from operand.pieces


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One output file: moves in the order of their destinations, without holes or overlaps; then the seals."""

    path: str
    size: int
    moves: tuple[Move, ...]
    seals: tuple[Seal, ...] = ()
    last: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole output. `roots` says where the source files lie; claims are checked before the first byte moves."""

    roots: Mapping[str, Path]
    files: tuple[PlannedFile, ...]
    claims: tuple[Claim, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all output files."""
        return sum(file.size for file in self.files)
