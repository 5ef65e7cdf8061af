"""Bands of computed tensors: operands gathered, the registered function called, its result rounded once."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from unshard.plan.moves import Compute, Operand
from unshard.run.casting import cast_into, raw_dtype
from unshard.run.functions import apply, footprint
from unshard.run.gathering import Gatherer, crop_all
from unshard.run.results import Rounding
from unshard.tensors import Box, flat_range_boxes

if TYPE_CHECKING:
    from unshard.dtypes import Array


class Operands:
    """The operands of one move, for one thread. Those that every band needs whole are gathered once."""

    def __init__(self, move: Compute, gatherer: Gatherer) -> None:
        self.move = move
        self._gatherer = gatherer
        self._whole = [
            gather_rows(operand, None, 0, 0, gatherer) if operand.banded is None else None for operand in move.operands
        ]

    def compute(self, start: int, stop: int) -> tuple[Array, Rounding]:
        """The rows `start <= row < stop` of the output, as raw integers, and what became of them."""
        import numpy as np

        move = self.move
        inputs = [
            gather_rows(operand, operand.banded, start, stop, self._gatherer) if whole is None else whole
            for operand, whole in zip(move.operands, self._whole, strict=True)
        ]
        result = apply(move.function, inputs, move.parameters)
        shape = (stop - start, *move.shape[1:]) if move.shape else ()
        if result.shape != shape:
            raise TypeError(f"{move.function} returned shape {result.shape} for {move.name}; expected {shape}")
        out = np.empty(shape, raw_dtype(move.dtype))
        return out, cast_into(out.view(move.dtype.numpy), result, move.dtype)


def gather_rows(operand: Operand, axis: int | None, start: int, stop: int, gatherer: Gatherer) -> Array:
    """An operand in its dtype and public shape, cut to `start <= i < stop` of a public axis, or whole."""
    import numpy as np

    if axis is None:
        out = np.empty(operand.shape, raw_dtype(operand.dtype))
        gatherer.gather_whole(operand.pieces, operand.grid, out, operand.dtype)
        return out.view(operand.dtype.numpy)
    out = np.empty((*operand.shape[:axis], stop - start, *operand.shape[axis + 1 :]), raw_dtype(operand.dtype))
    places = _grid_axes(operand.shape, operand.grid)[axis]
    done = 0
    for part in flat_range_boxes([operand.grid[place] for place in places], start, stop):
        offsets, sizes = [0] * len(operand.grid), list(operand.grid)
        for place, offset, size in zip(places, part.offsets, part.sizes, strict=True):
            offsets[place], sizes[place] = offset, size
        box = Box(tuple(offsets), tuple(sizes))
        rows = out[(slice(None),) * axis + (slice(done, done + part.volume),)]
        gatherer.gather(crop_all(operand.pieces, box), box, rows.reshape(box.sizes), operand.dtype)
        done += part.volume
    return out.view(operand.dtype.numpy)


def memory_of_rows(move: Compute, rows: int) -> int:
    """Bytes that the operands, the function and the result take for so many rows."""
    elements = rows * prod(move.shape[1:])
    total = elements * (footprint(move.function) + move.dtype.itemsize)
    for operand in move.operands:
        cut = prod(operand.shape) if operand.banded is None else prod(operand.shape) // move.shape[0] * rows
        total += cut * operand.dtype.itemsize
    return total


def _grid_axes(shape: Sequence[int], grid: Sequence[int]) -> list[range]:
    """Per public axis, the grid axes that it is the row-major product of. Axes of one element may be left over."""
    axes, place = [], 0
    for size in shape:
        start, product = place, 1
        while product < size:
            product *= grid[place]
            place += 1
        if product != size:
            raise ValueError(f"the grid {tuple(grid)} does not refine the shape {tuple(shape)}")
        axes.append(range(start, place))
    return axes
