"""Two models side by side, name by name: `verify --against`, and verl's `test`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from unshard.report.events import Advanced, PhaseFinished, PhaseStarted, Sink
from unshard.settings import Settings
from unshard.tensors import Box, Tensor
from unshard.verify.contents import same_bytes, split_bands
from unshard.verify.reading import PlainReader

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What still counts as equal. All None: only equal bits of equal types do.

    atol, rtol: as numpy's allclose, |a - b| <= atol + rtol x |b|, in fp64; NaN equals NaN.
    min_cosine: the least cosine similarity of a tensor seen as one vector.
    """

    atol: float | None = None
    rtol: float | None = None
    min_cosine: float | None = None

    @property
    def is_exact(self) -> bool:
        return self.atol is None and self.rtol is None and self.min_cosine is None


@dataclass(frozen=True, slots=True)
class TensorComparison:
    """One name on both sides. `max_difference` is in absolute value; `cosine` is 1.0 for two zero tensors.
    Both are None where shapes differ. `reason` is empty where the two count as equal.
    """

    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    identical: bool = False
    max_difference: float | None = None
    cosine: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdict over all names."""

    tensors: tuple[TensorComparison, ...]
    only_left: tuple[str, ...]
    only_right: tuple[str, ...]
    size: int = 0
    seconds: float = 0.0
    tolerance: Tolerance = field(default_factory=Tolerance)

    @property
    def failures(self) -> tuple[TensorComparison, ...]:
        return tuple([tensor for tensor in self.tensors if tensor.reason])

    @property
    def holds(self) -> bool:
        return not (self.failures or self.only_left or self.only_right)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two models: its tensors and the roots that their extents refer to."""

    tensors: Mapping[str, Tensor]
    roots: Mapping[str, Path]


def compare(left: Side, right: Side, tolerance: Tolerance, settings: Settings, sink: Sink) -> Comparison:
    """Compare all tensors of two models in bounded memory."""
    started = monotonic()
    names = [name for name in left.tensors if name in right.tensors]
    sink(PhaseStarted("compare", sum(left.tensors[name].size_in_bytes for name in names)))
    with PlainReader(left.roots) as left_reader, PlainReader(right.roots) as right_reader:

        def one(name: str) -> TensorComparison:
            pair = (left.tensors[name], right.tensors[name])
            result = _compare_tensor(name, pair, (left_reader, right_reader), tolerance, settings.buffer)
            sink(Advanced("compare", pair[0].size_in_bytes))
            return result

        with ThreadPoolExecutor(settings.jobs, thread_name_prefix="compare") as pool:
            tensors = tuple(pool.map(one, names))
    seconds = monotonic() - started
    sink(PhaseFinished("compare", seconds))
    return Comparison(
        tensors,
        tuple([name for name in left.tensors if name not in right.tensors]),
        tuple([name for name in right.tensors if name not in left.tensors]),
        sum(left.tensors[name].size_in_bytes for name in names),
        seconds,
        tolerance,
    )


def _compare_tensor(
    name: str, pair: tuple[Tensor, Tensor], readers: tuple[PlainReader, PlainReader], tolerance: Tolerance, buffer: int
) -> TensorComparison:
    left, right = pair
    shapes, dtypes = (left.shape, right.shape), (left.dtype.name, right.dtype.name)
    if left.shape != right.shape:
        return TensorComparison(name, shapes, dtypes, reason=f"shapes differ: {left.shape} and {right.shape}")
    elements = max(1, buffer // max(left.dtype.itemsize, right.dtype.itemsize))

    def bands() -> Iterator[tuple[Array, Array]]:
        for band in split_bands(left.shape, elements):
            yield _read_band(left, readers[0], band), _read_band(right, readers[1], band)

    if left.dtype == right.dtype and all(same_bytes(a, b) for a, b in bands()):
        return TensorComparison(name, shapes, dtypes, identical=True, max_difference=0.0, cosine=1.0)
    figures = _Figures(tolerance)
    for a, b in bands():
        figures.add(a, b)
    reason = figures.judge(dtypes)
    return TensorComparison(name, shapes, dtypes, False, figures.largest, figures.cosine, reason)


def _read_band(tensor: Tensor, reader: PlainReader, band: Box) -> Array:
    part = tensor
    for axis, (start, size) in enumerate(zip(band.offsets, band.sizes, strict=True)):
        part = part.slice(axis, start, start + size)
    return reader.read_tensor(part)


class _Figures:
    """Running figures of one tensor, in fp64."""

    def __init__(self, tolerance: Tolerance) -> None:
        self.tolerance = tolerance
        self.largest = 0.0
        self.outside = 0
        self._dot = self._left = self._right = 0.0

    def add(self, left: Array, right: Array) -> None:
        import numpy as np

        a, b = _widen(left), _widen(right)
        with np.errstate(all="ignore"):
            difference = np.abs(a - b)
            difference[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
            limit = (self.tolerance.atol or 0.0) + (self.tolerance.rtol or 0.0) * np.abs(b)
            self.outside += int(np.count_nonzero(~(difference <= limit)))
            self.largest = max(self.largest, float(np.nan_to_num(difference, nan=np.inf, posinf=np.inf).max()))
            self._dot += float(np.vdot(a, b).real)
            self._left += float(np.vdot(a, a).real)
            self._right += float(np.vdot(b, b).real)

    @property
    def cosine(self) -> float:
        if not (self._left and self._right):
            return 1.0 if self._left == self._right else 0.0
        return self._dot / sqrt(self._left) / sqrt(self._right)

    def judge(self, dtypes: tuple[str, str]) -> str:
        """Why two tensors whose bytes differ do not count as equal; empty if they do."""
        tolerance = self.tolerance
        if tolerance.is_exact:
            return f"types differ: {dtypes[0]} and {dtypes[1]}" if dtypes[0] != dtypes[1] else "bytes differ"
        reasons = []
        if self.outside and not (tolerance.atol is None and tolerance.rtol is None):
            reasons.append(f"{self.outside} elements are further apart than the tolerance")
        if tolerance.min_cosine is not None and not self.cosine >= tolerance.min_cosine:
            reasons.append(f"cosine {self.cosine:.6f} is below {tolerance.min_cosine}")
        return "; ".join(reasons)


def _widen(array: Array) -> np.ndarray[tuple[int, ...], np.dtype[Any]]:
    import numpy as np

    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)
