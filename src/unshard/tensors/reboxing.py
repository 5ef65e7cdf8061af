"""Chunks on another grid: the steps of which the algebra of tensors is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod

from unshard.tensors.box import Box, flat_range_boxes, row_major_strides
from unshard.tensors.chunk import Chunk, Extent


def slice_chunk(chunk: Chunk, axis: int, start: int, stop: int, step: int) -> Chunk | None:
    """The chunk's elements among `start, start + step, … < stop` of a grid axis, counted in steps; None if none."""
    low, size = chunk.box.offsets[axis], chunk.box.sizes[axis]
    first = max(0, -(-(low - start) // step))
    last = (min(low + size, stop) - 1 - start) // step
    if min(low + size, stop) <= start or last < first:
        return None
    extent, strides = chunk.extent, list(chunk.extent.strides)
    shift = (start + first * step - low) * strides[axis]
    strides[axis] *= step
    offsets, sizes = list(chunk.box.offsets), list(chunk.box.sizes)
    offsets[axis], sizes[axis] = first, last - first + 1
    extent = Extent(extent.file, extent.offset + shift, tuple(strides), extent.dtype)
    return Chunk(Box(tuple(offsets), tuple(sizes)), extent, chunk.rank)


def chunks_at(
    chunks: Sequence[Chunk], grid: Sequence[int], first: int, end: int, indices: range
) -> list[tuple[Chunk, ...]]:
    """The chunks at each of some row-major indices of the grid axes `first:end`, without those axes.

    Each chunk is looked at once, so that taking all indices apart costs what comes out of it, and no more.
    """
    found: list[list[Chunk]] = [[] for _ in indices]
    steps = row_major_strides(grid[first:end])
    for chunk in without_empty(chunks):
        places = _places(chunk, first, end, steps, indices)
        if not places:
            continue
        box, extent = chunk.box, chunk.extent
        rest = Box((*box.offsets[:first], *box.offsets[end:]), (*box.sizes[:first], *box.sizes[end:]))
        strides = (*extent.strides[:first], *extent.strides[end:])
        for index, shift in places:
            moved = Extent(extent.file, extent.offset + shift, strides, extent.dtype)
            found[index - indices.start].append(Chunk(rest, moved, chunk.rank))
    return [tuple(members) for members in found]


def _places(chunk: Chunk, first: int, end: int, steps: Sequence[int], indices: range) -> list[tuple[int, int]]:
    """Where a chunk meets some row-major indices of the axes `first:end`: (index, bytes from the chunk's first)."""
    box, places = chunk.box, [(0, 0)]
    axes = zip(box.offsets[first:end], box.sizes[first:end], chunk.extent.strides[first:end], steps, strict=True)
    for low, size, stride, step in axes:
        places = [
            (index + at * step, shift + (at - low) * stride)
            for index, shift in places
            for at in range(
                max(low, (indices.start - index) // step), min(low + size, -(-(indices.stop - index) // step))
            )
        ]
    return places


def without_empty(chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """The chunks that have elements. An empty one must not lose the axis, or the length, that makes it empty."""
    return tuple([chunk for chunk in chunks if 0 not in chunk.box.sizes])


def pick_axes(chunk: Chunk, places: Sequence[int]) -> Chunk:
    """The chunk with the grid axes at `places`, in that order; axes left out must have one element."""
    box, extent = chunk.box, chunk.extent
    picked = Box(tuple([box.offsets[place] for place in places]), tuple([box.sizes[place] for place in places]))
    strides = tuple([extent.strides[place] for place in places])
    return Chunk(picked, Extent(extent.file, extent.offset, strides, extent.dtype), chunk.rank)


def on_new_axis(chunk: Chunk, where: int, place: int) -> Chunk:
    """The chunk at `place` of a grid axis that is put before the axis `where`."""
    box, extent = chunk.box, chunk.extent
    moved = Box((*box.offsets[:where], place, *box.offsets[where:]), (*box.sizes[:where], 1, *box.sizes[where:]))
    strides = (*extent.strides[:where], 0, *extent.strides[where:])
    return Chunk(moved, Extent(extent.file, extent.offset, strides, extent.dtype), chunk.rank)


def _rebox(chunk: Chunk, first: int, end: int, boxes: Iterator[tuple[Box, int, tuple[int, ...]]]) -> Iterator[Chunk]:
    """The chunk cut in pieces: grid axes `first:end` become those of each given (box, byte shift, strides)."""
    box, extent = chunk.box, chunk.extent
    for part, shift, strides in boxes:
        yield Chunk(
            Box(
                (*box.offsets[:first], *part.offsets, *box.offsets[end:]),
                (*box.sizes[:first], *part.sizes, *box.sizes[end:]),
            ),
            Extent(
                extent.file,
                extent.offset + shift,
                (*extent.strides[:first], *strides, *extent.strides[end:]),
                extent.dtype,
            ),
            chunk.rank,
        )


def split_axis(chunks: Sequence[Chunk], axis: int, shape: Sequence[int]) -> tuple[Chunk, ...]:
    """A grid axis split into several, row-major: each chunk becomes at most 2 x len(shape) - 1."""
    steps = row_major_strides(shape)

    def pieces(chunk: Chunk) -> Iterator[tuple[Box, int, tuple[int, ...]]]:
        low, size, stride = chunk.box.offsets[axis], chunk.box.sizes[axis], chunk.extent.strides[axis]
        strides = tuple([stride * step for step in steps])
        for box in flat_range_boxes(shape, low, low + size):
            start = sum([offset * step for offset, step in zip(box.offsets, steps, strict=True)])
            yield box, (start - low) * stride, strides

    return _flatten(chunks, lambda chunk: _rebox(chunk, axis, axis + 1, pieces(chunk)))


def merge_axes(chunks: Sequence[Chunk], grid: Sequence[int], first: int, end: int) -> tuple[Chunk, ...]:
    """Grid axes `first:end` merged into one, row-major.

    A chunk that is not one run of the merged axis is cut into its runs, and its replicas with it, however they lie.
    This is the one place where boxes can multiply. It is reached only by reshapes across factors that do not divide
    each other, by slices across factors, and by concatenations of factors without a common refinement.
    """
    sizes = grid[first:end]
    starts: dict[Box, int] = {}
    for chunk in chunks:
        start = _run_start(chunk.box.sizes[first:end], sizes, chunk.extent.strides[first:end])
        starts[chunk.box] = max(start, starts.get(chunk.box, 0))

    def pieces(chunk: Chunk) -> Iterator[tuple[Box, int, tuple[int, ...]]]:
        offsets, counts = chunk.box.offsets[first:end], chunk.box.sizes[first:end]
        strides = chunk.extent.strides[first:end]
        run = starts[chunk.box]
        length = prod(counts[run:])
        spread = [stride for count, stride in zip(counts[run:], strides[run:], strict=True) if count > 1]
        step = spread[-1] if spread else 0
        for outer in product(*[range(count) for count in counts[:run]]):
            start = 0
            for place, size in enumerate(sizes):
                start = start * size + offsets[place] + (outer[place] if place < run else 0)
            shift = sum([index * stride for index, stride in zip(outer, strides[:run], strict=True)])
            yield Box((start,), (length,)), shift, (step,)

    return _flatten(chunks, lambda chunk: _rebox(chunk, first, end, pieces(chunk)))


def _run_start(counts: Sequence[int], sizes: Sequence[int], strides: Sequence[int]) -> int:
    """The first axis of the longest tail that is one run: whole but for that axis, and evenly spaced in the file."""
    run, inner, step = len(sizes), 1, 0
    while run > 0:
        here = run - 1
        if counts[here] > 1:
            if inner == 1:
                step = strides[here]
            elif strides[here] != step * inner:
                break
        inner *= sizes[here]
        run = here
        if counts[here] != sizes[here]:
            break
    return run


def _flatten(chunks: Sequence[Chunk], cut: Callable[[Chunk], Iterator[Chunk]]) -> tuple[Chunk, ...]:
    return tuple([piece for chunk in chunks for piece in cut(chunk)])
