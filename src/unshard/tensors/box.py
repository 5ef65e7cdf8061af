"""Hyper-rectangles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Box:
    """The hyper-rectangle of elements `offsets[d] <= index[d] < offsets[d] + sizes[d]`. No axes: a scalar."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise ValueError(f"a box needs as many offsets as sizes, not {self.offsets} and {self.sizes}")
        if self.offsets and (min(self.offsets) < 0 or min(self.sizes) < 0):
            raise ValueError(f"a box cannot be negative: offsets {self.offsets}, sizes {self.sizes}")

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """The box of a whole tensor of this shape."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    @property
    def stops(self) -> tuple[int, ...]:
        """The first index past the box, per axis."""
        return tuple([offset + size for offset, size in zip(self.offsets, self.sizes, strict=True)])

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the box lies inside a tensor of this shape."""
        return len(shape) == len(self.sizes) and all(stop <= size for stop, size in zip(self.stops, shape, strict=True))

    def translate(self, by: Sequence[int]) -> Box:
        """The same box moved by `by`."""
        return Box(tuple([offset + step for offset, step in zip(self.offsets, by, strict=True)]), self.sizes)

    def relative_to(self, origin: Sequence[int]) -> Box:
        """The same box, counted from `origin`."""
        return Box(tuple([offset - start for offset, start in zip(self.offsets, origin, strict=True)]), self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """The common elements, or None when there are none."""
        starts = tuple([max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True)])
        sizes = tuple([min(a, b) - start for a, b, start in zip(self.stops, other.stops, starts, strict=True)])
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def subtract(self, other: Box) -> list[Box]:
        """What is left of this box without `other`, as at most 2 x ndim disjoint boxes."""
        common = self.intersect(other)
        if common is None:
            return [self] if self.volume else []
        left: list[Box] = []
        offsets, sizes = list(self.offsets), list(self.sizes)
        for axis, (start, stop) in enumerate(zip(common.offsets, common.stops, strict=True)):
            end = offsets[axis] + sizes[axis]
            for low, high in ((offsets[axis], start), (stop, end)):
                if low < high:
                    left.append(
                        Box(
                            (*offsets[:axis], low, *offsets[axis + 1 :]),
                            (*sizes[:axis], high - low, *sizes[axis + 1 :]),
                        )
                    )
            offsets[axis], sizes[axis] = start, stop - start
        return left

    def __str__(self) -> str:
        if not self.sizes:
            return "[]"
        return "[" + ", ".join([f"{start}:{stop}" for start, stop in zip(self.offsets, self.stops, strict=True)]) + "]"


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes of the row-major elements `start <= i < stop` of a tensor, in row-major order.

    There are at most 2 x ndim - 1 of them: partial heads, the full middle, partial tails.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row

    def within(index: int, low: int, high: int) -> Iterator[Box]:
        for box in flat_range_boxes(shape[1:], low, high):
            yield Box((index, *box.offsets), (1, *box.sizes))

    if first == last and stop - start < row:
        yield from within(first, start - first * row, stop - first * row)
        return
    if start > first * row:
        yield from within(first, start - first * row, row)
        first += 1
    whole_stop = stop // row
    if first < whole_stop:
        yield Box((first, *(0 for _ in shape[1:])), (whole_stop - first, *shape[1:]))
    if whole_stop * row < stop:
        yield from within(whole_stop, 0, stop - whole_stop * row)


def row_major_strides(sizes: Sequence[int], itemsize: int = 1) -> tuple[int, ...]:
    """Strides of a contiguous block of these sizes; in elements, or in bytes where `itemsize` says so."""
    strides = [itemsize] * len(sizes)
    for axis in range(len(sizes) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * sizes[axis + 1]
    return tuple(strides)
