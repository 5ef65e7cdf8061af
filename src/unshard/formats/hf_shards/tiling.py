"""Whether boxes make up a tensor: what is needed to tell its shape; the proof for all of them is the plan's."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from typing import Literal

from unshard.checkpoint import Shape
from unshard.tensors import Box


@dataclass(frozen=True, slots=True)
class Flaw:
    """Why boxes do not make up a tensor, and where."""

    kind: Literal["hole", "overlap", "outside"]
    where: str


def find_flaw(shape: Shape, boxes: Collection[Box]) -> Flaw | None:
    """The first flaw of some distinct boxes without empty ones, or None if they are the tensor.

    Where several axes are cut, only the number of elements is compared.
    """
    outside = next((box for box in boxes if not box.fits(shape)), None)
    if outside is not None:
        return Flaw("outside", f"{outside} in shape {list(shape)}")
    cut = [axis for axis, size in enumerate(shape) if any(box.sizes[axis] != size for box in boxes)]
    if len(cut) == 1:
        return _find_along(cut[0], shape, boxes)
    stored, size = sum([box.volume for box in boxes]), prod(shape)
    if stored == size:
        return None
    return Flaw("hole" if stored < size else "overlap", f"{stored:,} elements of {size:,}")


def _find_along(axis: int, shape: Shape, boxes: Collection[Box]) -> Flaw | None:
    """The first flaw along the only axis that is cut."""
    end = 0
    for start, stop in sorted([(box.offsets[axis], box.stops[axis]) for box in boxes]):
        if start != end:
            low, high = sorted((start, end))
            return Flaw("hole" if start > end else "overlap", _describe(axis, shape, low, min(high, stop)))
        end = stop
    return None if end == shape[axis] else Flaw("hole", _describe(axis, shape, end, shape[axis]))


def _describe(axis: int, shape: Shape, start: int, stop: int) -> str:
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[axis], sizes[axis] = start, stop - start
    return str(Box(tuple(offsets), tuple(sizes)))
