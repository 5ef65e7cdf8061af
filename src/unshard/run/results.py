"""What a run tells afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rounding:
    """What became of a tensor whose elements were cast or computed.

    `nan` counts NaN elements of the source; `overflow` finite elements that the narrower type can only hold as an
    infinity (or as NaN, where it has no infinity).
    """

    elements: int = 0
    nan: int = 0
    overflow: int = 0

    def __add__(self, other: Rounding) -> Rounding:
        return Rounding(self.elements + other.elements, self.nan + other.nan, self.overflow + other.overflow)


@dataclass(frozen=True, slots=True)
class RunResult:
    """Wall `seconds`, and per tensor that was cast or computed what became of it."""

    seconds: float
    rounded: Mapping[str, Rounding]
