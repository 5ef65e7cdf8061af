"""The progress of a phase, as events."""

from __future__ import annotations

from threading import Lock
from time import monotonic

from unshard.report.events import Advanced, PhaseFinished, PhaseStarted, Sink

_QUIET = 0.02
"""Seconds between two reports of progress."""


class Meter:
    """Progress of a phase, summed over threads and told now and then. A context: it starts and finishes the phase."""

    def __init__(self, sink: Sink, phase: str, total: int) -> None:
        self._sink, self._phase, self._total = sink, phase, total
        self._lock = Lock()
        self._untold = 0
        self._started = self._told = monotonic()

    def __enter__(self) -> Meter:
        self._sink(PhaseStarted(self._phase, self._total))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._tell()
            self._sink(PhaseFinished(self._phase, self.seconds))

    @property
    def seconds(self) -> float:
        """Wall time since the start."""
        return monotonic() - self._started

    def add(self, size: int) -> None:
        """So many bytes more are done."""
        with self._lock:
            self._untold += size
            if monotonic() - self._told >= _QUIET:
                self._tell()

    def _tell(self) -> None:
        if self._untold:
            self._sink(Advanced(self._phase, self._untold))
        self._untold, self._told = 0, monotonic()
