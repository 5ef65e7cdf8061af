"""Elements from files to arrays: gathered piece by piece in bounded reads, placed, transposed and cast on the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unshard.dtypes import DType
from unshard.files import OpenFiles
from unshard.run.bands import Read, split_reads
from unshard.run.casting import cast_into, raw_dtype
from unshard.run.results import Rounding
from unshard.settings import Settings
from unshard.tensors import Box, Chunk, Tensor, flat_range_boxes

if TYPE_CHECKING:
    from unshard.dtypes import Array


class Gatherer:
    """Gathers for one thread. `buffer` is the most that is read at once, in bytes, into a buffer that is used again."""

    def __init__(self, files: OpenFiles, buffer: int) -> None:
        import numpy as np

        self._files = files
        self._scratch = np.empty(max(buffer, 16), np.uint8)

    def gather(self, pieces: Iterable[Chunk], box: Box, out: Array, dtype: DType) -> Rounding:
        """Fill `out` with the elements of `box`, from pieces that lie inside it, and tell what was cast.

        out: an array of `box.sizes` of the unsigned integers that stand for `dtype` (`raw_dtype`), with any strides.
        """
        total = Rounding()
        for piece in pieces:
            inside = piece.box.relative_to(box.offsets)
            total += self._place(piece, _part(out, inside), dtype)
        return total

    def gather_whole(self, pieces: Sequence[Chunk], grid: Sequence[int], out: Array, dtype: DType) -> Rounding:
        """Fill `out`, of any shape with as many elements as the grid, with a whole tensor."""
        return self.gather(pieces, Box.whole(grid), out.reshape(tuple(grid)), dtype)

    def gather_flat(
        self, pieces: Sequence[Chunk], grid: Sequence[int], start: int, stop: int, out: Array, dtype: DType
    ) -> Rounding:
        """Fill the one-dimensional `out` with the row-major elements `start <= i < stop` of a tensor."""
        total, done = Rounding(), 0
        for box in flat_range_boxes(grid, start, stop):
            part = out[done : done + box.volume].reshape(box.sizes)
            total += self.gather(crop_all(pieces, box), box, part, dtype)
            done += box.volume
        return total

    def _place(self, piece: Chunk, out: Array, dtype: DType) -> Rounding:
        stored = piece.extent.dtype
        if stored == dtype and out.flags.c_contiguous and piece.extent.is_contiguous(piece.box.sizes):
            self._files.read_into(piece.extent.file, piece.extent.offset, out.reshape(-1).view("u1").data)
            return Rounding()
        total = Rounding()
        for read in split_reads(piece, self._scratch.size):
            part = _part(out, read.box)
            if stored == dtype:
                part[...] = self._fetch(piece, read, dtype)
            else:
                source = self._fetch(piece, read, stored).view(stored.numpy)
                total += cast_into(part.view(dtype.numpy), source, dtype)
        return total

    def _fetch(self, piece: Chunk, read: Read, dtype: DType) -> Array:
        """The elements of one read, as a view of the scratch buffer that holds until the next read."""
        import numpy as np

        self._files.read_into(piece.extent.file, read.offset, self._scratch.data[: read.size])
        return np.ndarray(read.box.sizes, raw_dtype(dtype), self._scratch, 0, read.strides)


def crop_all(pieces: Iterable[Chunk], box: Box) -> list[Chunk]:
    """The parts of the pieces that lie in a box."""
    return [piece.crop(common) for piece in pieces if (common := piece.box.intersect(box)) is not None]


def read_tensor(tensor: Tensor, roots: Mapping[str, Path]) -> Array:
    """A tensor as an array of its dtype. The chunks are trusted to cover it.

    Raises FormatError where a file cannot be read or is too short.
    """
    import numpy as np

    out = np.empty(tensor.shape, raw_dtype(tensor.dtype))
    pieces = list({chunk.box: chunk for chunk in tensor.chunks}.values())
    with OpenFiles(roots) as files:
        Gatherer(files, Settings().buffer).gather_whole(pieces, tensor.grid, out, tensor.dtype)
    return out.view(tensor.dtype.numpy)


def _part(array: Array, box: Box) -> Array:
    """A view of the elements of a box; of a scalar, too."""
    index: tuple[Any, ...] = tuple([slice(start, stop) for start, stop in zip(box.offsets, box.stops, strict=True)])
    return array[(*index, ...)]
