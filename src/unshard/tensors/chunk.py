"""Pieces of tensors that exist somewhere on a disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from unshard.dtypes import DType
from unshard.tensors.box import Box, row_major_strides

PLAIN = "plain"
"""The encoding of bytes that lie in their file as they are."""

ENCODINGS = ("zstd",)
"""Those that must be decoded: as a stream of Zstandard (RFC 8878)."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A run of a file's bytes that must be decoded, from its first byte on, before any of it can be read.

    encoding:      how it is encoded, one of `ENCODINGS`.
    start, length: the run, in bytes of the file.
    size:          bytes of the decoded content that extents may refer to; a container may end some bytes behind them.
    holds:         what the whole content must turn out to hold, as the format told it that read the head; None where
                   the format has decoded all of it.
    """

    encoding: str
    start: int
    length: int
    size: int
    holds: str | None = None


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file, by the name of the root it lies under and its path from there, so that a plan can travel.

    With `encoded`, the decoded content of a run of its bytes: offsets are counted in that. The roots' own places are
    kept beside the catalog and the plan (`Checkpoint.roots`, `Plan.roots`).
    """

    root: str
    path: str
    encoded: Encoded | None = None

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the bytes of a box lie: a strided view of a file.

    `offset` is the byte at which the first element of the box lies, `strides` are bytes between neighbours along each
    axis of the box (0 repeats, negative is not allowed), `dtype` is the stored type. The view of an encoded file is one
    of its decoded content: such an extent feeds tiles, never a copy.
    """

    file: SourceFile
    offset: int
    strides: tuple[int, ...]
    dtype: DType

    @property
    def encoding(self) -> str:
        """How the bytes are encoded in the file: "plain", "zstd"."""
        return self.file.encoded.encoding if self.file.encoded else PLAIN

    def span(self, sizes: Sequence[int]) -> int:
        """Bytes from the first element of a box of these sizes, which is not empty, to the end of its last."""
        steps = [(size - 1) * stride for size, stride in zip(sizes, self.strides, strict=True)]
        return sum(steps) + self.dtype.itemsize

    def is_contiguous(self, sizes: Sequence[int]) -> bool:
        """Whether a box of these sizes is one row-major run of bytes. Axes of one element do not count."""
        if 0 in sizes:
            return True
        expected = self.dtype.itemsize
        for size, stride in zip(reversed(sizes), reversed(self.strides), strict=True):
            if size > 1:
                if stride != expected:
                    return False
                expected *= size
        return True


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a tensor: which elements, where their bytes are, and which rank saved them (None: not per rank)."""

    box: Box
    extent: Extent
    rank: int | None = None

    @property
    def size_in_bytes(self) -> int:
        return self.box.volume * self.extent.dtype.itemsize

    def crop(self, box: Box) -> Chunk:
        """The part of the chunk that lies in `box`, which must lie inside the chunk's own box."""
        extent = self.extent
        steps = box.relative_to(self.box.offsets).offsets
        shift = sum([step * stride for step, stride in zip(steps, extent.strides, strict=True)])
        moved = extent if shift == 0 else replace(extent, offset=extent.offset + shift)
        return Chunk(box, moved, self.rank)


def contiguous_chunk(
    file: SourceFile, offset: int, shape: Sequence[int], dtype: DType, *, rank: int | None = None
) -> Chunk:
    """A chunk that is a whole tensor of this shape, lying row-major at byte `offset`."""
    return Chunk(Box.whole(shape), Extent(file, offset, row_major_strides(shape, dtype.itemsize), dtype), rank)
