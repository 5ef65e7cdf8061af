"""Slow and obvious stand-ins for disk and engine: files are byte strings, tensors are assembled with numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from unshard.dtypes import DType
from unshard.plan.moves import Compute, Copy, Literal, Plan, Tile
from unshard.tensors import Box, Chunk, Extent, SourceFile, Tensor

Array = np.ndarray[Any, Any]


class Disk:
    """Files in memory. `save` appends an array and tells where it lies."""

    def __init__(self) -> None:
        self.files: dict[SourceFile, bytearray] = {}

    def save(
        self, array: Array, dtype: DType, file: str, *, order: Sequence[int] | None = None, gap: int = 0
    ) -> Extent:
        """Append the array after `gap` bytes, with its axes in memory in the given order."""
        order = tuple(range(array.ndim)) if order is None else tuple(order)
        place = SourceFile("disk", file)
        data = self.files.setdefault(place, bytearray())
        data += b"\xee" * gap
        stored = np.array(array.transpose(order), order="C")
        offset = len(data)
        data += stored.tobytes()
        strides = [0] * array.ndim
        for stride, axis in zip(stored.strides, order, strict=True):
            strides[axis] = stride
        return Extent(place, offset, tuple(strides), dtype)

    def view(self, chunk: Chunk) -> Array:
        """The elements of a chunk, as they are stored. Fails where they do not lie inside the file."""
        extent = chunk.extent
        data = self.files[extent.file]
        return np.ndarray(chunk.box.sizes, extent.dtype.numpy, bytes(data), extent.offset, extent.strides)

    def gather(self, dtype: DType, shape: Sequence[int], chunks: Sequence[Chunk]) -> Array:
        """The array of a grid. Every chunk must be inside, every element be written, replicas be equal."""
        out = np.zeros(tuple(shape), dtype.numpy)
        written = np.zeros(tuple(shape), bool)
        for chunk in chunks:
            assert chunk.box.fits(shape)
            where = (*[slice(a, b) for a, b in zip(chunk.box.offsets, chunk.box.stops, strict=True)], ...)
            values = self.view(chunk).astype(dtype.numpy)
            again = written[where]
            assert out[where][again].tobytes() == values[again].tobytes()
            out[where] = values
            written[where] = True
        assert written.all()
        return out

    def assemble(self, tensor: Tensor) -> Array:
        return self.gather(tensor.dtype, tensor.grid, tensor.chunks).reshape(tensor.shape)


def cut_randomly(shape: Sequence[int], choose: Callable[[int, int], int], depth: int = 3) -> list[Box]:
    """Boxes that tile a shape, uneven, empty and nested, by cuts that `choose(low, high)` decides."""

    def divide(box: Box, level: int) -> list[Box]:
        if level == 0 or not box.sizes or choose(0, 3) == 0:
            return [box]
        axis = choose(0, len(box.sizes) - 1)
        middle = choose(0, box.sizes[axis])
        left = Box(box.offsets, (*box.sizes[:axis], middle, *box.sizes[axis + 1 :]))
        right = Box(
            (*box.offsets[:axis], box.offsets[axis] + middle, *box.offsets[axis + 1 :]),
            (*box.sizes[:axis], box.sizes[axis] - middle, *box.sizes[axis + 1 :]),
        )
        return divide(left, level - 1) + divide(right, level - 1)

    return divide(Box.whole(shape), depth)


def shard(disk: Disk, name: str, array: Array, dtype: DType, boxes: Sequence[Box]) -> Tensor:
    """A tensor whose boxes lie contiguous in a file per rank."""
    chunks = []
    for rank, box in enumerate(boxes):
        where = tuple(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True))
        chunks.append(Chunk(box, disk.save(array[where], dtype, f"rank_{rank}", gap=rank % 3), rank))
    return Tensor(name, dtype, array.shape, tuple(chunks))


def interpret(plan: Plan, disk: Disk, functions: Mapping[str, Callable[..., Array]] | None = None) -> dict[str, bytes]:
    """The output files of a plan; every byte must be written exactly once."""
    outputs = {}
    for file in plan.files:
        data = bytearray(file.size)
        position = 0
        for move in file.moves:
            if isinstance(move, Literal):
                written = move.data
            elif isinstance(move, Copy):
                written = bytes(disk.files[move.file][move.offset : move.offset + move.size])
            elif isinstance(move, Tile):
                assert len({piece.box for piece in move.pieces}) == len(move.pieces)
                written = disk.gather(move.dtype, move.shape, move.pieces).tobytes()
            else:
                written = _compute(move, disk, functions or {})
            assert move.destination == position
            assert len(written) == move.size
            data[position : position + len(written)] = written
            position += len(written)
        assert position == file.size
        outputs[file.path] = bytes(data)
    return outputs


def _compute(move: Compute, disk: Disk, functions: Mapping[str, Callable[..., Array]]) -> bytes:
    inputs = [
        disk.gather(operand.dtype, operand.grid, operand.pieces).reshape(operand.shape) for operand in move.operands
    ]
    return functions[move.function](inputs, move.parameters).astype(move.dtype.numpy).tobytes()
