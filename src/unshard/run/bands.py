"""How the grid of a tensor is cut into bands that fit a buffer, and a piece of it into reads. Arithmetic only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from unshard.tensors import Box, Chunk

READ_THROUGH = 32 << 10
"""Bytes of a gap in a file that are read and thrown away rather than skipped: copying as much takes as long as another
call from Python (some 4 µs), and a disk reads ahead further than that anyway."""


@dataclass(frozen=True, slots=True)
class Read:
    """One read: `size` bytes from byte `offset` of the file, in which the elements of `box` lie with these strides.

    `box` is counted from the first element of the piece.
    """

    offset: int
    size: int
    box: Box
    strides: tuple[int, ...]


def split_bands(shape: Sequence[int], most: int) -> Iterator[Box]:
    """Boxes of at most `most` elements (but at least one) that are contiguous in row-major order, in that order.

    The bands along an axis are of nearly equal size.
    """
    if prod(shape) == 0:
        return
    axis, inner = len(shape), 1
    while axis > 0 and inner * shape[axis - 1] <= most:
        axis -= 1
        inner *= shape[axis]
    if axis == 0:
        yield Box.whole(shape)
        return
    axis, tail = axis - 1, tuple(shape[axis:])
    for outer in product(*[range(size) for size in shape[:axis]]):
        for start, stop in split_evenly(shape[axis], most // inner):
            yield Box((*outer, start, *(0 for _ in tail)), (*(1 for _ in outer), stop - start, *tail))


def split_evenly(length: int, most: int) -> Iterator[tuple[int, int]]:
    """The bounds of parts of at most `most` (and at least one), of nearly equal length."""
    count = -(-length // max(1, most))
    for number in range(count):
        yield length * number // count, length * (number + 1) // count


def pieces_by_band(pieces: Sequence[Chunk], bands: Iterator[Box]) -> Iterator[tuple[Box, tuple[Chunk, ...]]]:
    """Each band with the pieces that meet it, cropped to it; the bands come in row-major order.

    Pieces wait in the order of the first axis and are forgotten once it has passed them, so that a tensor of many
    pieces and many bands does not cost their product.
    """
    waiting = sorted(pieces, key=lambda piece: piece.box.offsets[:1], reverse=True)
    active: list[Chunk] = []
    for band in bands:
        if band.sizes:
            start, stop = band.offsets[0], band.offsets[0] + band.sizes[0]
            while waiting and waiting[-1].box.offsets[0] < stop:
                active.append(waiting.pop())
            active = [piece for piece in active if piece.box.offsets[0] + piece.box.sizes[0] > start]
        else:
            active = list(pieces)
        met = [(piece, common) for piece in active if (common := piece.box.intersect(band)) is not None]
        yield band, tuple([piece.crop(common) for piece, common in met])


def is_crossed(piece: Chunk) -> bool:
    """Whether the file keeps another axis of the piece together than the output does: a transpose."""
    axes = [axis for axis, size in enumerate(piece.box.sizes) if size > 1 and piece.extent.strides[axis]]
    return bool(axes) and min(axes, key=lambda axis: (piece.extent.strides[axis], -axis)) != axes[-1]


def split_reads(piece: Chunk, most: int) -> Iterator[Read]:
    """The reads that fetch a piece, each of at most `most` bytes (but at least one element).

    From the axis of the smallest stride outwards, axes are read as one span as long as the gaps in it are short and it
    fits; the axis where it stops to fit is cut, those further out are walked one by one. Repeated axes (stride 0) are
    read once.
    """
    sizes, strides = piece.box.sizes, piece.extent.strides
    span = piece.extent.dtype.itemsize
    parts = [[(0, size)] for size in sizes]
    walked = False
    for axis in sorted(range(len(sizes)), key=lambda axis: strides[axis]):
        size, stride = sizes[axis], strides[axis]
        if size == 1 or stride == 0:
            continue
        walked = walked or stride - span > READ_THROUGH
        rows = 1 if walked else min(size, max(1, (most - span) // stride + 1))
        parts[axis] = list(split_evenly(size, rows))
        walked = walked or rows < size
        span += (rows - 1) * stride
    for bounds in product(*parts):
        box = Box(tuple([start for start, _ in bounds]), tuple([stop - start for start, stop in bounds]))
        yield Read(
            piece.extent.offset + sum([at * stride for at, stride in zip(box.offsets, strides, strict=True)]),
            piece.extent.span(box.sizes),
            box,
            strides,
        )
