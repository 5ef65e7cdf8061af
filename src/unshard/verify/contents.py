"""Contents, checked from the source's side: chunk by chunk, against the bytes found in the output.

This is a second path on purpose. It does not look at the plan, and nothing that placed, gathered, cast or wrote a byte
serves it: where an output tensor lies is read from the output's own headers, source and output are read by plain
`pread`, and every element must have been met exactly as often as it exists. What it takes for granted is the mapping
(which source elements an output name stands for, which of several replicas was read) and, for computed tensors, the
registered function itself; and it says so.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from unshard.errors import FormatError, UnshardError, VerificationError
from unshard.plan.coverage import primary_chunks
from unshard.plan.partition import narrow
from unshard.report.events import Sink
from unshard.report.meter import Meter
from unshard.run.functions import split_rows
from unshard.settings import Settings
from unshard.tensors import Box, Chunk, Computed, Tensor, Value, contiguous_chunk
from unshard.verify.boxes import split_boxes
from unshard.verify.reading import PlainReader, scratch_for

if TYPE_CHECKING:
    from unshard.dtypes import Array

Mode = Literal["full", "sample"]
SAMPLED_BAND = 64 << 10
"""Bytes of a band where contents are sampled."""
SAMPLED_SHARE = 32
"""One band in so many is read, besides those that hold a chunk's first or last element."""
TASK_SIZE = 16 << 20
"""Bytes of output that one task checks."""
SHOWN_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class Pair:
    """What an output tensor should hold, and where it was found in the output."""

    expected: Value
    found: Tensor


@dataclass(slots=True)
class ContentsResult:
    """Bytes that were compared, and every difference (at most one line per tensor and chunk)."""

    size: int = 0
    problems: list[UnshardError] = field(default_factory=list)


def check_contents(
    pairs: Sequence[Pair],
    expected_roots: Mapping[str, Path],
    found_roots: Mapping[str, Path],
    mode: Mode,
    settings: Settings,
    sink: Sink,
    scratch: Path | None = None,
) -> ContentsResult:
    """Compare every pair, byte by byte after the cast that was asked for.

    `mode` is "full", or "sample": both ends of every chunk and one band in 32 of the rest. Buffers stay below
    `settings.memory`; the work is spread over `settings.jobs` threads. Compressed pieces are decoded to temporary files
    in the directory `scratch` (None: where TMPDIR says).
    """
    band_size = settings.buffer if mode == "full" else min(settings.buffer, SAMPLED_BAND)
    result = ContentsResult()
    total = sum(pair.expected.size_in_bytes for pair in pairs)
    with (
        Meter(sink, "verify", total) as meter,
        PlainReader(expected_roots, scratch_for([pair.expected for pair in pairs], settings.jobs, scratch)) as sources,
        PlainReader(found_roots) as outputs,
    ):
        comparer = _Comparer(sources, outputs)

        def check(task: _Task) -> tuple[int, list[UnshardError]]:
            done = task.run(comparer)
            meter.add(task.size)
            return done

        tasks = [task for pair in pairs for task in _tasks(pair, band_size, mode)]
        with ThreadPoolExecutor(settings.jobs, thread_name_prefix="verify") as pool, sources.stopping_on_error():
            for compared, problems in pool.map(check, tasks):
                result.size += compared
                result.problems += problems
    if len(result.problems) > SHOWN_PROBLEMS:
        left = len(result.problems) - SHOWN_PROBLEMS
        result.problems[SHOWN_PROBLEMS:] = [VerificationError(f"… and {left} more differences")]
    return result


@dataclass(frozen=True, slots=True)
class _Task:
    size: int
    run: Callable[[_Comparer], tuple[int, list[UnshardError]]]


def _tasks(pair: Pair, band_size: int, mode: Mode) -> Iterator[_Task]:
    if isinstance(pair.expected, Computed):
        computed = pair.expected
        yield _Task(computed.size_in_bytes, lambda comparer: comparer.compare_computed(computed, pair.found))
        return
    tensor = pair.expected
    chunks = sorted(primary_chunks(tensor), key=lambda chunk: chunk.box.offsets)
    bands = list(split_boxes(tensor.grid, chunks, max(1, band_size // tensor.dtype.itemsize)))
    if mode == "sample":
        bands = _sample(bands, chunks, seed=tensor.name)
    per_task = max(1, TASK_SIZE // band_size)
    for start in range(0, len(bands), per_task):
        some = bands[start : start + per_task]
        size = sum(band.volume for band in some) * tensor.dtype.itemsize

        def run(comparer: _Comparer, some: Sequence[Box] = some) -> tuple[int, list[UnshardError]]:
            return comparer.compare_bands(tensor, chunks, pair.found, some)

        yield _Task(size, run)


def _sample(bands: Sequence[Box], chunks: Sequence[Chunk], seed: str) -> list[Box]:
    """The bands that hold a chunk's first or last element, and some of the others, the same at each run."""
    chosen = random.Random(seed)
    corners = {chunk.box.offsets for chunk in chunks}
    corners |= {tuple([stop - 1 for stop in chunk.box.stops]) for chunk in chunks}

    def holds_corner(band: Box) -> bool:
        return any(
            all(low <= at < high for low, at, high in zip(band.offsets, corner, band.stops, strict=True))
            for corner in corners
        )

    return [band for band in bands if chosen.random() < 1 / SAMPLED_SHARE or holds_corner(band)]


class _Comparer:
    """Reads both sides and compares them. Shared by threads."""

    def __init__(self, sources: PlainReader, outputs: PlainReader) -> None:
        self.sources, self.outputs = sources, outputs

    def compare_bands(
        self, tensor: Tensor, chunks: Sequence[Chunk], found: Tensor, bands: Sequence[Box]
    ) -> tuple[int, list[UnshardError]]:
        problems: dict[str, UnshardError] = {}
        itemsize, compared = tensor.dtype.itemsize, 0
        for band in bands:
            written = self._read_output(found, tensor.grid, band)
            met = 0
            for chunk in chunks:
                common = _common(chunk.box, band)
                if common is None:
                    continue
                expected = self.sources.read(chunk.crop(common), tensor.dtype)
                inside = common.relative_to(band.offsets)
                part = written[
                    tuple([slice(low, high) for low, high in zip(inside.offsets, inside.stops, strict=True)])
                ]
                if not same_bytes(expected, part):
                    where = f"rank {chunk.rank}" if chunk.rank is not None else chunk.extent.file.path
                    message = (
                        f"`{tensor.name}`: the output differs from {where}"
                        f" (`{chunk.extent.file}`) in box {common} of grid {tensor.grid}"
                    )
                    problems.setdefault(str(chunk.box), VerificationError(message))
                met += common.volume
            if met != band.volume:
                message = f"`{tensor.name}`: {band.volume - met} elements of box {band} have no source"
                problems.setdefault("cover", VerificationError(message))
            compared += met * itemsize
        return compared, list(problems.values())

    def compare_computed(self, computed: Computed, found: Tensor) -> tuple[int, list[UnshardError]]:
        for start, stop in split_rows(computed.function, computed.shape, computed.banded):
            whole = Box.whole(computed.shape)
            band = narrow(whole, 0, start, stop) if computed.shape else whole
            written = self._read_output(found, computed.shape, band)
            if not same_bytes(self.sources.compute(computed, start, stop), written):
                rows = f"in rows {start}:{stop}" if computed.shape else ""
                message = f"`{computed.name}`: the output is not what `{computed.function}` computes {rows}"
                return computed.size_in_bytes, [VerificationError(message)]
        return computed.size_in_bytes, []

    def _read_output(self, found: Tensor, grid: Sequence[int], band: Box) -> Array:
        """A band of the output tensor, whose bytes lie row-major at one place."""
        (chunk,) = found.chunks
        whole = contiguous_chunk(chunk.extent.file, chunk.extent.offset, grid, found.dtype)
        try:
            return self.outputs.read(whole.crop(band), found.dtype)
        except FormatError as error:
            raise VerificationError(error.message) from error


def _common(a: Box, b: Box) -> Box | None:
    """The intersection, quick to say no: bands and chunks are ordered along the first axis."""
    if a.offsets and (a.offsets[0] >= b.offsets[0] + b.sizes[0] or b.offsets[0] >= a.offsets[0] + a.sizes[0]):
        return None
    return a.intersect(b)


def same_bytes(a: Array, b: Array) -> bool:
    """Whether two arrays of one dtype hold the same bits: NaN equals itself, 0.0 does not equal -0.0."""
    import numpy as np

    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    left = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
    right = np.ascontiguousarray(b).reshape(-1).view(np.uint8)
    words = left.size // 8 * 8
    return np.array_equal(left[:words].view(np.uint64), right[:words].view(np.uint64)) and np.array_equal(
        left[words:], right[words:]
    )
