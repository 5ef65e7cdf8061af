"""The boxes in which a tensor is read on both sides, in whatever order its elements lie on either."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import isqrt, prod

from unshard.tensors import Box, Chunk


def split_boxes(shape: Sequence[int], chunks: Iterable[Chunk], most: int) -> Iterator[Box]:
    """Boxes of at most `most` elements that cover `shape`, in row-major order.

    They are contiguous in a row-major tensor, unless one of `chunks` lies in another order: a column-major one would be
    read in as many pieces as it has columns, again for each band of rows. Then they are tiles, with long runs on both
    sides.
    """
    if 0 < prod(shape) <= most:
        yield Box.whole(shape)
        return
    crossed = next((axis for axis in map(_crossed_axis, chunks) if axis is not None), None)
    sizes = _box_sizes(shape, crossed, most)
    for starts in product(*[range(0, length, size) for length, size in zip(shape, sizes, strict=True)]):
        yield Box(starts, tuple([min(size, n - start) for start, size, n in zip(starts, sizes, shape, strict=True)]))


def _box_sizes(shape: Sequence[int], crossed: int | None, most: int) -> list[int]:
    """How far a box reaches along each axis: first along the last one, and along `crossed` where that is another."""
    sizes = [1] * len(shape)
    order = list(reversed(range(len(shape))))
    if crossed is not None:
        sizes[crossed] = max(1, min(shape[crossed], isqrt(most)))
        order.insert(1, crossed)
    for axis in order:
        sizes[axis] = max(1, min(shape[axis], most // (prod(sizes) // sizes[axis])))
    return sizes


def _crossed_axis(chunk: Chunk) -> int | None:
    """The axis along which elements of a chunk are next to each other; None where it is the last one."""
    sized = zip(chunk.extent.strides, chunk.box.sizes, strict=True)
    strides = {axis: stride for axis, (stride, size) in enumerate(sized) if size > 1 and stride > 0}
    nearest = min(reversed(strides), key=strides.__getitem__, default=None)
    return None if nearest == max(strides, default=None) else nearest
