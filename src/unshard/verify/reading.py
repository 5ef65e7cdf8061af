"""Plain reads, for verification only: simple enough to be believed, and nothing in common with the engine's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from unshard.dtypes import DType
from unshard.files import OpenFiles, Scratch, encoded_files, room_for
from unshard.run.functions import apply
from unshard.tensors import Box, Chunk, Computed, SourceFile, Tensor, Value

if TYPE_CHECKING:
    import numpy as np

    from unshard.dtypes import Array

WASTE = 4
"""A strided piece is read as one span as long as no more than so many times its bytes are read."""
SMALL_SPAN = 256 << 10
"""A span that is read whatever share of it is needed, in bytes."""


class PlainReader:
    """Reads pieces of files under named roots. May be shared by threads.

    What is compressed is decoded anew, to `scratch`.
    """

    def __init__(self, roots: Mapping[str, Path], scratch: Scratch | None = None) -> None:
        self._files = OpenFiles(roots, scratch=scratch)

    def __enter__(self) -> PlainReader:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        self._files.close()

    @contextmanager
    def stopping_on_error(self) -> Iterator[None]:
        """An error inside of the `with` ends what other threads decode."""
        try:
            yield
        except BaseException:
            self._files.stop()
            raise

    def read(self, chunk: Chunk, dtype: DType) -> Array:
        """The elements of a chunk, cast to `dtype` (rounded to nearest even) where they are stored in another."""
        stored = self._read_strided(chunk)
        return stored if chunk.extent.dtype == dtype else cast(stored, dtype)

    def read_tensor(self, tensor: Tensor) -> Array:
        """A whole tensor, in its dtype and public shape."""
        import numpy as np

        out = np.empty(tensor.grid, tensor.dtype.numpy)
        for chunk in tensor.chunks:
            where = tuple([slice(low, high) for low, high in zip(chunk.box.offsets, chunk.box.stops, strict=True)])
            out[where] = self.read(chunk, tensor.dtype)
        return out.reshape(tensor.shape)

    def compute(self, computed: Computed, start: int, stop: int) -> Array:
        """The rows `start <= row < stop` of a computed tensor, rounded to its dtype."""
        inputs = [
            self.read_tensor(tensor if axis is None else tensor.slice(axis, start, stop))
            for tensor, axis in zip(computed.inputs, computed.banded, strict=True)
        ]
        return cast(apply(computed.function, inputs, computed.parameters), computed.dtype)

    def _read_strided(self, chunk: Chunk) -> Array:
        import numpy as np

        extent, sizes = chunk.extent, chunk.box.sizes
        if extent.is_contiguous(sizes):
            data = self._read(extent.file, extent.offset, chunk.size_in_bytes)
            return data.view(extent.dtype.numpy).reshape(sizes)
        needed = chunk.size_in_bytes
        span = extent.span(sizes)
        if span <= max(SMALL_SPAN, WASTE * needed):
            data = self._read(extent.file, extent.offset, span)
            return np.ndarray(sizes, extent.dtype.numpy, data.data, strides=extent.strides)
        axis = max(range(len(sizes)), key=lambda number: extent.strides[number] if sizes[number] > 1 else -1)
        out = np.empty(sizes, extent.dtype.numpy)
        for index in range(sizes[axis]):
            start = (*chunk.box.offsets[:axis], chunk.box.offsets[axis] + index, *chunk.box.offsets[axis + 1 :])
            row = chunk.crop(Box(start, (*sizes[:axis], 1, *sizes[axis + 1 :])))
            out[(slice(None),) * axis + (slice(index, index + 1),)] = self._read_strided(row)
        return out

    def _read(self, file: SourceFile, offset: int, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        import numpy as np

        data = np.empty(size, np.uint8)
        self._files.read_into(file, offset, data.data)
        return data


def scratch_for(values: Iterable[Value], workers: int, directory: Path | None = None) -> Scratch:
    """The scratch space for values that are read in this order."""
    tensors = (value.inputs if isinstance(value, Computed) else (value,) for value in values)
    uses = (encoded_files([chunk for tensor in inputs for chunk in tensor.chunks]) for inputs in tensors)
    return Scratch(directory, room_for(uses, workers))


def cast(array: Array, dtype: DType) -> Array:
    """The array in another type, rounded to nearest even."""
    import numpy as np

    out = np.empty(array.shape, dtype.numpy)
    with np.errstate(all="ignore"):
        np.copyto(out, array, casting="unsafe")
    return out
