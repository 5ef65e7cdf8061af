"""The registered pure functions that a `Compute` move may call.

A plan is data, so it names its functions; this is where the names are bound. A function sees numpy arrays only:

    @register("scaled_sum", footprint=8)
    def scaled_sum(inputs: Sequence[Array], parameters: Mapping[str, object]) -> Array:
        ...

inputs:     one array per operand, in the operand's dtype and public shape. An operand with `banded=a` arrives cut
            along its axis `a` to the rows of the output's first axis that are being computed; one with `banded=None`
            arrives whole. A move whose operands are all `None` cannot be cut: the function returns the whole output.
parameters: the move's JSON parameters.
returns:    the band, of shape `(rows, *shape[1:])`, in float32 or float64. The engine rounds it once, to the dtype of
            the move. Inputs are borrowed buffers: they must not be changed, nor kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from unshard.run.bands import split_evenly

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from unshard.dtypes import Array

Function: TypeAlias = Callable[["Sequence[Array]", Mapping[str, object]], "Array"]

DEFAULT_FOOTPRINT = 16
"""Bytes of memory per output element that a function is expected to take at its peak: two float64 arrays."""

BAND = 8 << 20
"""Bytes of memory that the function itself takes for one band: its footprint times the band's elements."""


@dataclass(frozen=True, slots=True)
class Registered:
    """A function and the bytes per output element that it takes at its peak, the result included."""

    function: Function
    footprint: int


_FUNCTIONS: dict[str, Registered] = {}

PROVIDERS = ("unshard.adapters.functions", "unshard.families.functions")
"""Modules that register functions when they are imported: a plan may come from a file, before anyone else did."""


def register(name: str, *, footprint: int = DEFAULT_FOOTPRINT) -> Callable[[Function], Function]:
    """Bind a name to a function, once and for all plans. Raises ValueError where the name is taken."""

    def bind(function: Function) -> Function:
        if name in _FUNCTIONS:
            raise ValueError(f"a function named {name!r} is registered already")
        _FUNCTIONS[name] = Registered(function, footprint)
        return function

    return bind


def footprint(name: str) -> int:
    """Bytes of memory per output element that the function takes at its peak. Raises LookupError, as `apply`."""
    return _find(name).footprint


def apply(name: str, inputs: Sequence[Array], parameters: Mapping[str, object]) -> NDArray[np.floating[Any]]:
    """Call a registered function. LookupError: the name is unknown; TypeError: the result is no float."""
    result = _find(name).function(inputs, parameters)
    if result.dtype.name not in ("float32", "float64"):
        raise TypeError(f"{name} returned {result.dtype.name}; functions return float32 or float64")
    return result


def split_rows(name: str, shape: Sequence[int], banded: Sequence[int | None]) -> Iterator[tuple[int, int]]:
    """The bounds of the bands in which a function is computed, along the output's first axis.

    They depend on the function and the shapes alone: how many rows a matrix product gets may change its last bit, and
    no setting may change a byte of the output.
    """
    if not shape or all(axis is None for axis in banded):
        yield 0, shape[0] if shape else 1
        return
    yield from split_evenly(shape[0], BAND // max(1, prod(shape[1:]) * footprint(name)))


def _find(name: str) -> Registered:
    if name not in _FUNCTIONS:
        for provider in PROVIDERS:
            import_module(provider)
    try:
        return _FUNCTIONS[name]
    except KeyError:
        raise LookupError(f"no function is registered as {name!r}; known: {sorted(_FUNCTIONS)}") from None
