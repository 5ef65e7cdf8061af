"""Tensors whose elements are computed, and as much of the algebra as keeps them computable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from unshard.dtypes import DType
from unshard.tensors.tensor import Shaped, Tensor

Cut: TypeAlias = tuple[int | None, ...]
"""Per input, the axis that is cut with the same bounds as one axis of the output; None where it is needed whole."""


@dataclass(frozen=True, slots=True)
class Computed(Shaped):
    """A tensor whose elements are computed from others by a registered pure function (`run.functions`).

    function:   the registered name; parameters: its JSON parameters.
    inputs:     the tensors it reads. All work is done on bands of the output's first axis; `banded[i]` is the axis of
                input i that is cut with the same bounds, or None where each band needs the whole input.
    deeper:     the same for the output's further axes, in order, as far as the function may be cut along them.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    function: str
    parameters: Mapping[str, object]
    inputs: tuple[Tensor, ...]
    banded: Cut
    deeper: tuple[Cut, ...] = ()

    def rename(self, name: str) -> Computed:
        return replace(self, name=name)

    def cast(self, dtype: DType) -> Computed:
        """The result in another floating-point type; the function rounds once, at its end."""
        if not (dtype.is_float and self.dtype.is_float):
            raise ValueError(f"{self.name}: cannot cast {self.dtype} to {dtype}")
        return replace(self, dtype=dtype)

    def slice(self, axis: int, start: int, stop: int, step: int = 1) -> Computed:
        """Elements `start, start + step, … < stop` along an axis, as `Tensor.slice`: the inputs are cut instead.

        Raises ValueError where the function cannot be cut along that axis.
        """
        cuts = (self.banded, *self.deeper)
        if axis >= len(cuts) or all(place is None for place in cuts[axis]):
            raise ValueError(f"{self.name}: `{self.function}` cannot be cut along axis {axis}")
        inputs = tuple(
            [
                tensor if place is None else tensor.slice(place, start, stop, step)
                for tensor, place in zip(self.inputs, cuts[axis], strict=True)
            ]
        )
        count = len(range(start, min(stop, self.shape[axis]), step))
        return replace(self, inputs=inputs, shape=(*self.shape[:axis], count, *self.shape[axis + 1 :]))

    def select(self, axis: int, index: int) -> Computed:
        """The tensor at one index of the first axis, without that axis: one expert of a pack.

        Raises ValueError for other axes, and where the function has no further axis to be cut along in its place.
        """
        if axis != 0 or not self.deeper:
            raise ValueError(f"{self.name}: `{self.function}` cannot do without axis {axis}")
        one = self.slice(0, index, index + 1)
        inputs = [
            tensor if place is None else tensor.reshape(_without(tensor.shape, place))
            for tensor, place in zip(one.inputs, self.banded, strict=True)
        ]
        deeper = [
            tuple([_after(place, dropped) for place, dropped in zip(cut, self.banded, strict=True)])
            for cut in self.deeper
        ]
        return replace(one, shape=one.shape[1:], inputs=tuple(inputs), banded=deeper[0], deeper=tuple(deeper[1:]))


Value: TypeAlias = Tensor | Computed
"""What an output tensor can be made from."""


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def _after(place: int | None, dropped: int | None) -> int | None:
    """Where an input's axis is once another one has been dropped."""
    return place - 1 if place is not None and dropped is not None and place > dropped else place
