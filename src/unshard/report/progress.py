"""How far a phase is: bytes, rate and time left, as lines of a log or as bars on a terminal."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from unshard.words import bytes_in_words, seconds_in_words

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

TITLES = {"claims": "Checking", "write": "Writing", "verify": "Verifying", "compare": "Comparing"}

LOG_EVERY = 10.0
"""Seconds between two lines of progress in a log."""
BARS_AFTER = 0.3
"""Seconds that a phase must last before it gets a bar: shorter ones would only flicker."""


class Phase:
    """The figures of one phase. `total` and `done` are in bytes."""

    def __init__(self, name: str, total: int, clock: Callable[[], float] = monotonic) -> None:
        self.name, self.total, self.done = name, total, 0
        self._clock = clock
        self._started = clock()

    @property
    def title(self) -> str:
        return TITLES.get(self.name, self.name.capitalize())

    @property
    def seconds(self) -> float:
        return self._clock() - self._started

    @property
    def rate(self) -> float:
        """Bytes per second since the start."""
        return self.done / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """At the rate so far; None before the first byte."""
        return max(0, self.total - self.done) / self.rate if self.rate else None

    def __str__(self) -> str:
        left = self.seconds_left
        share = f" ({100 * self.done / self.total:.0f} %)" if self.total else ""
        line = f"{self.title}: {bytes_in_words(self.done)} of {bytes_in_words(self.total)}{share}"
        line += f", {bytes_in_words(self.rate)}/s"
        return line if left is None else f"{line}, {seconds_in_words(left)} left"


class Display(Protocol):
    """Where people watch the progress."""

    def show(self, phase: Phase) -> None:
        """The phase began, or its figures changed."""

    def remove(self, phase: Phase) -> None:
        """The phase has ended."""

    def close(self) -> None:
        """Leave nothing behind."""


class Lines:
    """A line now and then, for logs."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = monotonic) -> None:
        self._write, self._clock = write, clock
        self._last = clock()

    def show(self, phase: Phase) -> None:
        if phase.done and self._clock() - self._last >= LOG_EVERY:
            self._last = self._clock()
            self._write(str(phase))

    def remove(self, phase: Phase) -> None:
        """Nothing: the report will say how it went."""

    def close(self) -> None:
        """Nothing to clean up."""


class Bars:
    """A bar with bytes, rate and time left, for terminals. It vanishes when its phase ends."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def show(self, phase: Phase) -> None:
        if phase.name in self._tasks:
            self._bars().update(self._tasks[phase.name], completed=phase.done)
        elif phase.seconds >= BARS_AFTER:
            task = self._bars().add_task(phase.title, total=phase.total, completed=phase.done)
            self._tasks[phase.name] = task

    def remove(self, phase: Phase) -> None:
        if phase.name in self._tasks:
            self._bars().remove_task(self._tasks.pop(phase.name))
            if not self._tasks:
                self.close()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            self._tasks.clear()

    def _bars(self) -> Progress:
        if self._progress is None:
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._progress = Progress(*columns, TimeRemainingColumn(), console=self._console, transient=True)
            self._progress.start()
        return self._progress
