"""The equalities that a plan rests on (replicas, tied weights), checked byte by byte before anything is written."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING

from unshard.errors import IncompleteError, ModelError, UnshardError
from unshard.files import OpenFiles, Scratch
from unshard.plan.moves import Plan
from unshard.report.events import Sink
from unshard.report.meter import Meter
from unshard.run.threads import run_threads
from unshard.settings import Settings
from unshard.target import Claim
from unshard.tensors import Chunk, Tensor

if TYPE_CHECKING:
    from unshard.dtypes import Array
    from unshard.run.gathering import Gatherer


def check_claims(plan: Plan, settings: Settings, sink: Sink, scratch: Scratch | None = None) -> list[UnshardError]:
    """An error for every claim that does not hold, in the order of the claims.

    Two tensors that lie at the same place are equal without a look. Everything else is read, in buffers of
    `settings.buffer` bytes, by `settings.jobs` threads; a claim is left at its first difference. What is encoded is
    decoded to `scratch`.
    """
    claims = [claim for claim in plan.claims if not _is_trivial(claim)]
    if not claims:
        return []
    with Meter(sink, "claims", sum([claim.left.size_in_bytes for claim in claims])) as meter:
        return _ClaimCheck(claims, OpenFiles(plan.roots, scratch=scratch), settings, meter).run()


class _ClaimCheck:
    """Claims, and the bands of them that threads take one after the other."""

    def __init__(self, claims: list[Claim], files: OpenFiles, settings: Settings, meter: Meter) -> None:
        self._claims, self._files, self._settings, self._meter = claims, files, settings, meter
        self._failed: dict[int, UnshardError] = {}
        self._bands = self._list_bands()
        self._lock = Lock()
        self._stopped = False

    def run(self) -> list[UnshardError]:
        try:
            run_threads(self._settings.jobs, self._work, self._stop)
        finally:
            self._files.close()
        return [self._failed[number] for number in sorted(self._failed)]

    def _list_bands(self) -> Iterator[tuple[int, int, int]]:
        """(number of the claim, start, stop) of its elements `start <= i < stop`."""
        for number, claim in enumerate(self._claims):
            if claim.left.dtype != claim.right.dtype or claim.left.shape != claim.right.shape:
                self._failed[number] = _error(claim, "they differ in shape or dtype")
                continue
            step = max(1, self._settings.buffer // claim.left.dtype.itemsize)
            for start in count(0, step):
                if start >= claim.left.size or number in self._failed:
                    break
                yield number, start, min(start + step, claim.left.size)

    def _work(self) -> None:
        import numpy as np

        from unshard.run.gathering import Gatherer

        gatherer = Gatherer(self._files, self._settings.buffer)
        left, right = np.empty(self._settings.buffer, np.uint8), np.empty(self._settings.buffer, np.uint8)
        while True:
            with self._lock:
                band = None if self._stopped else next(self._bands, None)
            if band is None:
                return
            number, start, stop = band
            claim = self._claims[number]
            a = _read(claim.left, start, stop, left, gatherer)
            b = _read(claim.right, start, stop, right, gatherer)
            if not np.array_equal(a, b):
                element = start + int(np.flatnonzero(a != b)[0])
                index = tuple([int(at) for at in np.unravel_index(element, claim.left.shape)])
                with self._lock:
                    self._failed[number] = _error(claim, f"a difference at element {list(index)}")
            self._meter.add((stop - start) * claim.left.dtype.itemsize)

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
        self._files.stop()


def _read(tensor: Tensor, start: int, stop: int, buffer: Array, gatherer: Gatherer) -> Array:
    """Row-major elements of a tensor, as the integers that stand for its dtype."""
    from unshard.run.casting import raw_dtype

    size = (stop - start) * tensor.dtype.itemsize
    out = buffer[:size].view(raw_dtype(tensor.dtype))
    gatherer.gather_flat(tensor.chunks, tensor.grid, start, stop, out, tensor.dtype)
    return out


def _is_trivial(claim: Claim) -> bool:
    """Whether both sides are the same bytes of the same files."""

    def places(tensor: Tensor) -> list[Chunk]:
        return sorted([Chunk(chunk.box, chunk.extent) for chunk in tensor.chunks], key=lambda chunk: chunk.box.offsets)

    left, right = claim.left, claim.right
    return (left.shape, left.dtype, left.grid) == (right.shape, right.dtype, right.grid) and places(left) == places(
        right
    )


def _error(claim: Claim, difference: str) -> UnshardError:
    """Pieces of one tensor that disagree, or two tensors that the model says are one."""
    kind = IncompleteError if claim.left.name == claim.right.name else ModelError
    return kind(f"{claim.message} ({difference})", hint=claim.hint)
