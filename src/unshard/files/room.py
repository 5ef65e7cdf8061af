"""How much scratch space encoded files take while they are read. Arithmetic only: nothing is decoded here."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from unshard.tensors import Chunk, SourceFile

_UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class Scratch:
    """About `room` bytes in `directory`; None is the system's own place for temporary files, which TMPDIR sets."""

    directory: Path | None = None
    room: int = _UNLIMITED


def encoded_files(pieces: Iterable[Chunk]) -> set[SourceFile]:
    """The files of pieces that must be decoded."""
    return {piece.extent.file for piece in pieces if piece.extent.file.encoded is not None}


def room_for(uses: Iterable[Collection[SourceFile]], workers: int) -> int:
    """Bytes of scratch space in which encoded files stay decoded as long as they are used.

    uses: the encoded files of each tensor (or move), in the order in which they are read. That is kept roughly:
    `workers` threads are each at a place of their own.
    """
    first: dict[SourceFile, int] = {}
    last: dict[SourceFile, int] = {}
    for number, files in enumerate(uses):
        for file in files:
            first.setdefault(file, number)
            last[file] = number
    changes: dict[int, int] = {}
    for file in first:
        size = _size(file)
        changes[first[file]] = changes.get(first[file], 0) + size
        changes[last[file] + 1] = changes.get(last[file] + 1, 0) - size
    held = peak = 0
    for number in sorted(changes):
        held += changes[number]
        peak = max(peak, held)
    return min(sum(map(_size, first)), (workers + 1) * peak)


def _size(file: SourceFile) -> int:
    return file.encoded.size if file.encoded else 0
