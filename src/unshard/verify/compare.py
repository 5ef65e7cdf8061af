"""Two models side by side, name by name: `verify --against`, and verl's `test`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import sqrt
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from unshard.model_files import ADAPTER_CONFIG
from unshard.plan.partition import narrow
from unshard.report.events import Sink
from unshard.report.meter import Meter
from unshard.run.functions import split_rows
from unshard.settings import Settings
from unshard.tensors import Box, Computed, Tensor, Value
from unshard.verify.boxes import split_boxes
from unshard.verify.contents import same_bytes
from unshard.verify.reading import PlainReader, scratch_for
from unshard.verify.sides import Side
from unshard.words import count_in_words

if TYPE_CHECKING:
    from unshard.dtypes import Array


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
class SettingDifference:
    """A setting of an adapter on which its strength or place depends, and that differs."""

    file: str
    key: str
    left: Any
    right: Any


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdict over all names. `size` is in bytes of the left side."""

    tensors: tuple[TensorComparison, ...]
    only_left: tuple[str, ...]
    only_right: tuple[str, ...]
    settings: tuple[SettingDifference, ...] = ()
    size: int = 0
    seconds: float = 0.0
    tolerance: Tolerance = field(default_factory=Tolerance)

    @property
    def failures(self) -> tuple[TensorComparison, ...]:
        return tuple([tensor for tensor in self.tensors if tensor.reason])

    @property
    def differences(self) -> int:
        """How many things do not count as equal."""
        return len(self.failures) + len(self.only_left) + len(self.only_right) + len(self.settings)

    @property
    def holds(self) -> bool:
        return not self.differences

    @property
    def is_identical(self) -> bool:
        """Whether no bit differs."""
        return self.holds and all(tensor.identical for tensor in self.tensors)


ADAPTER_SETTINGS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora")
"""Keys of adapter_config.json without which equal tensors are not yet equal adapters."""


def compare(left: Side, right: Side, tolerance: Tolerance, settings: Settings, sink: Sink) -> Comparison:
    """Compare all tensors of two models in bounded memory, and the settings of adapters that both have."""
    pairs = _pair(left, right)
    total = sum(value.size_in_bytes for value, _ in pairs.values())
    with (
        Meter(sink, "compare", total) as meter,
        PlainReader(left.roots, scratch_for([a for a, _ in pairs.values()], settings.jobs)) as left_reader,
        PlainReader(right.roots, scratch_for([b for _, b in pairs.values()], settings.jobs)) as right_reader,
    ):

        def one(name: str) -> TensorComparison:
            a, b = pairs[name]
            result = _compare_values(name, (a, b), (left_reader, right_reader), tolerance, settings.buffer)
            meter.add(a.size_in_bytes)
            return result

        with (
            ThreadPoolExecutor(settings.jobs, thread_name_prefix="compare") as pool,
            left_reader.stopping_on_error(),
            right_reader.stopping_on_error(),
        ):
            tensors = tuple(pool.map(one, pairs))
    return Comparison(
        tensors,
        tuple([name for name in left.tensors if name not in pairs]),
        tuple([name for name in right.tensors if name not in pairs]),
        tuple(_compare_settings(left, right)),
        total,
        meter.seconds,
        tolerance,
    )


def _pair(left: Side, right: Side) -> dict[str, tuple[Value, Value]]:
    """Every name that both sides have, if only by a tie, with its values."""
    names = dict.fromkeys([*left.tensors, *right.tensors])
    found = {name: (_find(left, name), _find(right, name)) for name in names}
    return {name: (a, b) for name, (a, b) in found.items() if a is not None and b is not None}


def _find(side: Side, name: str) -> Value | None:
    value = side.tensors.get(name)
    return value if value is not None or name not in side.ties else side.tensors[side.ties[name]]


def _compare_settings(left: Side, right: Side) -> Iterator[SettingDifference]:
    for directory in left.adapters.keys() & right.adapters.keys():
        for key in ADAPTER_SETTINGS:
            a, b = [side.adapters[directory].get(key) or None for side in (left, right)]
            if a != b:
                yield SettingDifference((PurePosixPath(directory) / ADAPTER_CONFIG).as_posix(), key, a, b)


def _compare_values(
    name: str, pair: tuple[Value, Value], readers: tuple[PlainReader, PlainReader], tolerance: Tolerance, buffer: int
) -> TensorComparison:
    left, right = pair
    shapes, dtypes = (left.shape, right.shape), (left.dtype.name, right.dtype.name)
    if left.shape != right.shape:
        return TensorComparison(name, shapes, dtypes, reason="shapes differ")

    def bands() -> Iterator[tuple[Array, Array]]:
        for band in _cut(left, right, buffer):
            yield _read_band(left, readers[0], band), _read_band(right, readers[1], band)

    if left.dtype == right.dtype and all(same_bytes(a, b) for a, b in bands()):
        return TensorComparison(name, shapes, dtypes, identical=True, max_difference=0.0, cosine=1.0)
    figures = _Figures(tolerance)
    for a, b in bands():
        figures.add(a, b)
    reason = figures.judge(dtypes)
    return TensorComparison(name, shapes, dtypes, False, figures.largest, figures.cosine, reason)


def _cut(left: Value, right: Value, buffer: int) -> Iterator[Box]:
    """Bands of one shape that both sides can be read in: those of its function where a side is computed."""
    for value in (left, right):
        if isinstance(value, Computed):
            for start, stop in split_rows(value.function, value.shape, value.banded):
                whole = Box.whole(value.shape)
                yield narrow(whole, 0, start, stop) if value.shape else whole
            return
    on_shape = [value.chunks for value in (left, right) if isinstance(value, Tensor) and value.grid == value.shape]
    most = max(1, buffer // max(left.dtype.itemsize, right.dtype.itemsize))
    yield from split_boxes(left.shape, [chunk for chunks in on_shape for chunk in chunks], most)


def _read_band(value: Value, reader: PlainReader, band: Box) -> Array:
    if isinstance(value, Computed):
        start, stop = (band.offsets[0], band.stops[0]) if band.offsets else (0, 1)
        return reader.compute(value, start, stop)
    part = value
    for axis, (start, size) in enumerate(zip(band.offsets, band.sizes, strict=True)):
        part = part.slice(axis, start, start + size)
    return reader.read_tensor(part)


BLOCK = 32 << 10
"""Elements whose figures are computed at a time: four fp64 arrays of so many stay in a core's second-level cache."""


class _Figures:
    """Running figures of one tensor, in fp64. The parts of a complex number count as two elements."""

    def __init__(self, tolerance: Tolerance) -> None:
        import numpy as np

        self.tolerance = tolerance
        self.largest = 0.0
        self.outside = 0
        self._dot = self._left = self._right = 0.0
        self._blocks = np.empty((3, BLOCK), np.float64)

    def add(self, left: Array, right: Array) -> None:
        """Take in elements of both sides, of one shape."""
        import numpy as np

        left, right = _flatten(left), _flatten(right)
        with np.errstate(all="ignore"):
            for start in range(0, left.size, BLOCK):
                self._add_block(left[start : start + BLOCK], right[start : start + BLOCK])

    def _add_block(self, left: Array, right: Array) -> None:
        import numpy as np

        a, b, difference = self._blocks[:, : left.size]
        np.copyto(a, left, casting="unsafe")
        np.copyto(b, right, casting="unsafe")
        self._dot += float(np.einsum("i,i", a, b))
        self._left += float(np.einsum("i,i", a, a))
        self._right += float(np.einsum("i,i", b, b))
        np.abs(np.subtract(a, b, out=difference), out=difference)
        np.copyto(difference, 0.0, where=(a == b))  # equal infinities
        if np.isnan(difference.max()):
            np.copyto(difference, 0.0, where=np.isnan(a) & np.isnan(b))
            np.copyto(difference, np.inf, where=np.isnan(difference))
        self.largest = max(self.largest, float(difference.max()))
        limit: Any = self.tolerance.atol or 0.0
        if self.tolerance.rtol:
            limit = np.add(np.multiply(np.abs(b, out=b), self.tolerance.rtol, out=b), limit, out=b)
        self.outside += int(np.count_nonzero((difference > limit) | np.isinf(difference)))

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
            reasons.append(f"{count_in_words(self.outside, 'element')} beyond the tolerance")
        if tolerance.min_cosine is not None and not self.cosine >= tolerance.min_cosine:
            reasons.append(f"cosine {self.cosine:.6f} is below {tolerance.min_cosine}")
        return "; ".join(reasons)


def _flatten(array: Array) -> Array:
    """All elements in a row; complex ones as pairs."""
    flat = array.reshape(-1)
    return flat.view("f4") if flat.dtype == "c8" else flat
