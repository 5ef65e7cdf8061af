"""Tensors as lists of chunks, and the algebra that re-boxes them without touching a byte.

What keeps the algebra small: besides its public shape, a tensor knows the *grid* on which its chunks are boxes. Each
public axis is a row-major product of grid axes (`factors`). Splitting an axis refines the grid and cuts a box into at
most three; merging axes only regroups them. So `view(groups, heads, dim) -> select -> merge`, as grouped QKV, rotary
permutations, interleaves and packed experts need it, stays a handful of strided boxes, however many rows there are.
The grid has the same row-major order as the public shape, so whoever writes the bytes may forget the public shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from typing import TypeAlias

from unshard.dtypes import DType
from unshard.tensors.box import Box
from unshard.tensors.chunk import Chunk
from unshard.tensors.reboxing import (
    chunks_at,
    merge_axes,
    on_new_axis,
    pick_axes,
    slice_chunk,
    split_axis,
    without_empty,
)

Factors: TypeAlias = tuple[tuple[int, ...], ...]
"""Per public axis, the grid axes that it is the row-major product of."""


class Shaped:
    """What stored and computed tensors have in common."""

    __slots__ = ()

    dtype: DType
    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def size_in_bytes(self) -> int:
        """Bytes of the whole tensor in its dtype (not in the stored one)."""
        return self.size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Tensor(Shaped):
    """A named tensor made of chunks. Frozen: every operation returns a new one.

    dtype:   the type of the elements once read; a chunk stored in another type is cast when it is moved.
    shape:   the public shape.
    chunks:  boxes on the grid, with their places. Replicas are chunks with equal boxes. Nothing here promises that the
             chunks cover the tensor: that is proven by the plan.
    factors: see the module's docstring; by default each axis is its own grid axis.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    factors: Factors = ()

    def __post_init__(self) -> None:
        if len(self.factors) != len(self.shape):
            if self.factors:
                raise ValueError(f"{self.name}: {len(self.shape)} axes, but factors {self.factors}")
            object.__setattr__(self, "factors", tuple([(size,) for size in self.shape]))

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape on which the chunks' boxes lie; row-major the same as `shape`."""
        return tuple([size for group in self.factors for size in group])

    @property
    def is_cast(self) -> bool:
        """Whether some chunk is stored in another type than the tensor's."""
        return any(chunk.extent.dtype != self.dtype for chunk in self.chunks)

    @property
    def is_rounded(self) -> bool:
        """Whether some chunk is stored in a type of which the tensor's own does not hold every value."""
        return any(not self.dtype.holds(chunk.extent.dtype) for chunk in self.chunks)

    def rename(self, name: str) -> Tensor:
        return Tensor(name, self.dtype, self.shape, self.chunks, self.factors)

    def cast(self, dtype: DType) -> Tensor:
        """The tensor in another floating-point type: what is stored is cast, once.

        Raises ValueError for types that are not floating point, and for a tensor that was rounded: the second cast
        would have to start from the result of the first.
        """
        if dtype == self.dtype:
            return self
        if self.is_rounded or not (dtype.is_float and self.dtype.is_float):
            raise ValueError(f"{self.name}: cannot cast {self.dtype} to {dtype}")
        return replace(self, dtype=dtype)

    # -- selection -----------------------------------------------------------------------------------------------------

    def slice(self, axis: int, start: int, stop: int, step: int = 1) -> Tensor:
        """Elements `start, start + step, … < stop` along one axis, as numpy's basic slicing with a positive step."""
        axis, length = self._axis(axis), self.shape[axis]
        start, stop = min(start, length), min(stop, length)
        if step < 1 or start < 0 or stop < 0:
            raise ValueError(f"{self.name}: slices take a positive step and no negative bounds")
        count = max(0, -(-(stop - start) // step))
        shape = (*self.shape[:axis], count, *self.shape[axis + 1 :])
        if count == length:
            return self
        if count == 0 or self.size == 0:
            return Tensor(self.name, self.dtype, shape, ())
        group = self.factors[axis]
        inner = prod(group[1:])
        if len(group) > 1 and step == 1 and start % inner == 0 and stop % inner == 0:
            source, start, stop = self, start // inner, stop // inner
            group = (stop - start, *group[1:])
        else:
            source, group = self._with_plain_axis(axis), (count,)
        where = sum(len(earlier) for earlier in source.factors[:axis])
        chunks = [part for chunk in source.chunks if (part := slice_chunk(chunk, where, start, stop, step))]
        factors = (*source.factors[:axis], group, *source.factors[axis + 1 :])
        return replace(source, shape=shape, chunks=tuple(chunks), factors=factors)

    def select(self, axis: int, index: int) -> Tensor:
        """The tensor at one index of an axis, without that axis."""
        axis = self._axis(axis)
        if not 0 <= index < self.shape[axis]:
            raise ValueError(f"{self.name}: index {index} is outside an axis of {self.shape[axis]}")
        return self._without_axis(axis, range(index, index + 1))[0]

    def unstack(self, axis: int = 0) -> tuple[Tensor, ...]:
        """All tensors along an axis, without that axis. Takes as long as the chunks that come out are many."""
        axis = self._axis(axis)
        return self._without_axis(axis, range(self.shape[axis]))

    def split(self, axis: int, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        """Consecutive pieces of the given sizes, which must add up to the axis."""
        if sum(sizes) != self.shape[self._axis(axis)]:
            raise ValueError(f"{self.name}: pieces of {tuple(sizes)} do not add up to {self.shape[axis]}")
        return tuple([self.slice(axis, stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)])

    # -- shape ---------------------------------------------------------------------------------------------------------

    def transpose(self, order: Sequence[int] | None = None) -> Tensor:
        """Axes in another order; by default the last two swapped."""
        if order is None:
            order = (*range(self.ndim - 2), self.ndim - 1, self.ndim - 2)
        if sorted(order) != list(range(self.ndim)):
            raise ValueError(f"{self.name}: {tuple(order)} is no order of {self.ndim} axes")
        starts = [sum(len(group) for group in self.factors[:axis]) for axis in range(self.ndim)]
        places = [starts[axis] + number for axis in order for number in range(len(self.factors[axis]))]
        chunks = tuple([pick_axes(chunk, places) for chunk in self.chunks])
        return replace(
            self,
            shape=tuple([self.shape[axis] for axis in order]),
            chunks=chunks,
            factors=tuple([self.factors[axis] for axis in order]),
        )

    def reshape(self, shape: Sequence[int]) -> Tensor:
        """The same elements in row-major order under another shape."""
        shape = tuple(shape)
        if prod(shape) != self.size:
            raise ValueError(f"{self.name}: {self.shape} cannot become {shape}")
        if self.size == 0:
            return Tensor(self.name, self.dtype, shape, ())
        grid, chunks, place = list(self.grid), without_empty(self.chunks), 0
        factors: list[tuple[int, ...]] = []
        for size in shape:
            start, missing = place, size
            while missing > 1:
                if missing % grid[place] == 0:
                    missing //= grid[place]
                    place += 1
                elif grid[place] % missing == 0:
                    chunks = split_axis(chunks, place, (missing, grid[place] // missing))
                    grid[place : place + 1] = [missing, grid[place] // missing]
                else:
                    end = place + 1
                    while prod(grid[place:end]) % missing:
                        end += 1
                    chunks = merge_axes(chunks, grid, place, end)
                    grid[place:end] = [prod(grid[place:end])]
            factors.append(tuple(grid[start:place]))
        if place < len(grid):  # axes of one element are left over
            if factors:
                factors[-1] += tuple(grid[place:])
            else:
                chunks = tuple([pick_axes(chunk, ()) for chunk in chunks])
        return Tensor(self.name, self.dtype, shape, chunks, tuple(factors))

    def broadcast(self, axis: int, size: int) -> Tensor:
        """An axis of one element repeated `size` times."""
        axis = self._axis(axis)
        if self.shape[axis] != 1:
            raise ValueError(f"{self.name}: axis {axis} has {self.shape[axis]} elements; only one can be repeated")
        source = self._with_plain_axis(axis)
        where = sum(len(group) for group in source.factors[:axis])

        def repeated(chunk: Chunk) -> Chunk:
            sizes, strides = list(chunk.box.sizes), list(chunk.extent.strides)
            sizes[where], strides[where] = size, 0
            extent = replace(chunk.extent, strides=tuple(strides))
            return Chunk(Box(chunk.box.offsets, tuple(sizes)), extent, chunk.rank)

        return replace(
            source,
            shape=(*source.shape[:axis], size, *source.shape[axis + 1 :]),
            chunks=tuple([repeated(chunk) for chunk in without_empty(source.chunks)]) if size else (),
            factors=(*source.factors[:axis], (size,), *source.factors[axis + 1 :]),
        )

    # -- inside --------------------------------------------------------------------------------------------------------

    def _axis(self, axis: int) -> int:
        if not -self.ndim <= axis < self.ndim:
            raise ValueError(f"{self.name}: no axis {axis} in shape {self.shape}")
        return axis % self.ndim

    def _without_axis(self, axis: int, indices: range) -> tuple[Tensor, ...]:
        """The tensor at each of some indices of an axis, without that axis."""
        first = sum(len(group) for group in self.factors[:axis])
        end = first + len(self.factors[axis])
        found = chunks_at(self.chunks, self.grid, first, end, indices)
        shape = (*self.shape[:axis], *self.shape[axis + 1 :])
        factors = (*self.factors[:axis], *self.factors[axis + 1 :])
        return tuple([Tensor(self.name, self.dtype, shape, chunks, factors) for chunks in found])

    def _with_factors(self, axis: int, group: Sequence[int]) -> Tensor:
        """The same tensor whose `axis` has these factors, which refine those that it has."""
        source = self if self.factors[axis] else self._with_plain_axis(axis)
        if source.factors[axis] == tuple(group):
            return source
        where = sum(len(earlier) for earlier in source.factors[:axis])
        rest, parts = list(group), []
        for factor in reversed(source.factors[axis]):
            part: list[int] = []
            while prod(part) < factor:
                part.insert(0, rest.pop())
            parts.append(part)
        parts[-1] = rest + parts[-1]
        chunks = without_empty(source.chunks)
        for number, part in enumerate(parts):
            chunks = split_axis(chunks, where + len(parts) - 1 - number, part)
        factors = (*source.factors[:axis], tuple(group), *source.factors[axis + 1 :])
        return replace(source, chunks=chunks, factors=factors)

    def _with_plain_axis(self, axis: int) -> Tensor:
        """The same tensor whose `axis` is one grid axis."""
        group = self.factors[axis]
        if len(group) == 1:
            return self
        where = sum(len(earlier) for earlier in self.factors[:axis])
        chunks = merge_axes(self.chunks, self.grid, where, where + len(group))
        factors = (*self.factors[:axis], (self.shape[axis],), *self.factors[axis + 1 :])
        return replace(self, chunks=chunks, factors=factors)


def concat(tensors: Sequence[Tensor], axis: int = 0, *, name: str | None = None) -> Tensor:
    """Tensors one behind the other along an axis; all else must agree.

    Raises ValueError where dtypes or the other axes differ.
    """
    first = tensors[0]
    axis = first._axis(axis)
    others = {(t.dtype, (*t.shape[:axis], *t.shape[axis + 1 :])) for t in tensors}
    if len(others) != 1:
        raise ValueError(f"{name or first.name}: cannot concatenate {[(str(t.dtype), t.shape) for t in tensors]}")
    total = sum(t.shape[axis] for t in tensors)
    shape = (*first.shape[:axis], total, *first.shape[axis + 1 :])
    tensors = _with_common_factors([t for t in tensors if t.size], axis)
    if not tensors:
        return Tensor(name or first.name, first.dtype, shape, ())
    where = sum(len(group) for group in tensors[0].factors[:axis])
    rank = len(tensors[0].grid)
    chunks: list[Chunk] = []
    offset = 0
    for tensor in tensors:
        by = tuple([offset if place == where else 0 for place in range(rank)])
        chunks += [Chunk(chunk.box.translate(by), chunk.extent, chunk.rank) for chunk in tensor.chunks]
        offset += tensor.factors[axis][0]
    group = (offset, *tensors[0].factors[axis][1:])
    factors = (*tensors[0].factors[:axis], group, *tensors[0].factors[axis + 1 :])
    return Tensor(name or first.name, first.dtype, shape, tuple(chunks), factors)


def stack(tensors: Sequence[Tensor], axis: int = 0, *, name: str | None = None) -> Tensor:
    """Tensors of one shape along a new axis.

    Raises ValueError where dtypes or shapes differ.
    """
    first = tensors[0]
    axis %= first.ndim + 1
    if len({(t.dtype, t.shape) for t in tensors}) != 1:
        raise ValueError(f"{name or first.name}: cannot stack {[(str(t.dtype), t.shape) for t in tensors]}")
    shape = (*first.shape[:axis], len(tensors), *first.shape[axis:])
    if not first.size:
        return Tensor(name or first.name, first.dtype, shape, ())
    tensors = _with_common_factors(tensors)
    factors = (*tensors[0].factors[:axis], (len(tensors),), *tensors[0].factors[axis:])
    where = sum(len(group) for group in tensors[0].factors[:axis])
    chunks = [on_new_axis(chunk, where, place) for place, t in enumerate(tensors) for chunk in without_empty(t.chunks)]
    return Tensor(name or first.name, first.dtype, shape, tuple(chunks), factors)


def _with_common_factors(tensors: Sequence[Tensor], axis: int | None = None) -> list[Tensor]:
    """The tensors with equal factors on every axis, but for the first factor of `axis`, which may differ."""
    tensors = list(tensors)
    for number in range(len(tensors[0].shape) if tensors else 0):
        groups = {t.factors[number][1:] if number == axis else t.factors[number] for t in tensors}
        if len(groups) == 1 and all(t.factors[number] for t in tensors):
            continue
        inner = _common_inner_factors(tensors, number)
        if inner is None:
            tensors = [t._with_plain_axis(number) for t in tensors]
        else:
            tensors = [t._with_factors(number, (t.shape[number] // prod(inner), *inner)) for t in tensors]
    return tensors


def _common_inner_factors(tensors: Sequence[Tensor], axis: int) -> tuple[int, ...] | None:
    """The factors, but for the first, that refine those of all tensors on an axis; None where there are none."""
    runs = {prod(t.factors[axis][place:]) for t in tensors for place in range(1, len(t.factors[axis]))} | {1}
    ladder = sorted(runs)
    if any(longer % shorter for shorter, longer in pairwise(ladder)) or any(
        t.shape[axis] % ladder[-1] for t in tensors
    ):
        return None
    return tuple([longer // shorter for shorter, longer in pairwise(ladder)][::-1])
