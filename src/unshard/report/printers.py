"""Events → a terminal, a log, or JSON lines. Progress goes to stderr; with `--json` everything goes to stdout."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from threading import Lock
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from unshard.errors import UnshardError
from unshard.report.events import Advanced, Event, Message, PhaseFinished, PhaseStarted
from unshard.report.words import bytes_in_words, seconds_in_words

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LOG_EVERY = 10.0
"""Seconds between two lines of progress in a log."""
JSON_EVERY = 0.5
"""Seconds between two progress events in JSON."""

PHASES = {"claims": "Checking", "write": "Writing", "verify": "Verifying", "compare": "Comparing"}


class Printer(Protocol):
    """Where a command's words go. A context: progress is shown between enter and exit."""

    def __enter__(self) -> Printer: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def sink(self, event: Event) -> None:
        """Take an event; from any thread."""

    def error(self, error: UnshardError) -> None:
        """Say what went wrong."""


def choose_printer(*, as_json: bool, quiet: bool, verbose: bool) -> Printer:
    """The printer that fits the options and the terminal."""
    if as_json:
        return JsonPrinter(sys.stdout)
    if quiet or not sys.stderr.isatty():
        return LogPrinter(sys.stderr, quiet=quiet, verbose=verbose)
    return TerminalPrinter(verbose=verbose)


class _Phase:
    """Bytes done, rate and time left of one phase."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.started = total, 0, monotonic()

    def line(self) -> str:
        seconds = monotonic() - self.started
        rate = self.done / seconds if seconds else 0.0
        left = (self.total - self.done) / rate if rate else 0.0
        share = 100 * self.done / self.total if self.total else 100.0
        return (
            f"{bytes_in_words(self.done)} of {bytes_in_words(self.total)} ({share:.0f} %), "
            f"{bytes_in_words(rate)}/s, {seconds_in_words(left)} left"
        )


class LogPrinter:
    """Plain lines, one now and then."""

    def __init__(self, stream: TextIO, *, quiet: bool = False, verbose: bool = False) -> None:
        self._stream, self._quiet, self._verbose = stream, quiet, verbose
        self._phases: dict[str, _Phase] = {}
        self._last = monotonic()
        self._lock = Lock()

    def __enter__(self) -> LogPrinter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stream.flush()

    def sink(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, PhaseStarted):
                self._phases[event.phase] = _Phase(event.total)
            elif isinstance(event, Advanced):
                phase = self._phases.setdefault(event.phase, _Phase(0))
                phase.done += event.size
                if monotonic() - self._last >= LOG_EVERY and not self._quiet:
                    self._last = monotonic()
                    print(f"{PHASES.get(event.phase, event.phase)}: {phase.line()}", file=self._stream, flush=True)
            elif isinstance(event, Message) and self._shows(event.level):
                print(f"{event.level}: {event.text}", file=self._stream, flush=True)

    def _shows(self, level: str) -> bool:
        return level == "warning" or self._verbose or (level == "note" and not self._quiet)

    def error(self, error: UnshardError) -> None:
        print(f"error: {error}", file=self._stream, flush=True)


class TerminalPrinter:
    """A progress bar with bytes, rate and time left."""

    def __init__(self, *, verbose: bool = False) -> None:
        self._verbose = verbose
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> TerminalPrinter:
        return self

    def _bar(self) -> Progress:
        if self._progress is None:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            console = Console(stderr=True)
            self._progress = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
            self._progress.start()
        return self._progress

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def sink(self, event: Event) -> None:
        if isinstance(event, PhaseStarted):
            self._tasks[event.phase] = self._bar().add_task(PHASES.get(event.phase, event.phase), total=event.total)
        elif isinstance(event, Advanced):
            self._bar().advance(self._tasks[event.phase], event.size)
        elif isinstance(event, PhaseFinished):
            self._bar().remove_task(self._tasks.pop(event.phase))
        elif event.level != "debug" or self._verbose:
            print(f"{event.level}: {event.text}", file=sys.stderr)

    def error(self, error: UnshardError) -> None:
        from rich.console import Console
        from rich.text import Text

        text = Text("error: ", style="bold red").append(error.message, style="default not bold")
        if error.hint:
            text.append("\n\n").append("hint: ", style="bold cyan").append(error.hint, style="default not bold")
        Console(stderr=True, soft_wrap=True, highlight=False).print(text)


class JsonPrinter:
    """One JSON object a line; the field `event` says what it is."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._done: dict[str, int] = {}
        self._last: dict[str, float] = {}
        self._lock = Lock()

    def __enter__(self) -> JsonPrinter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stream.flush()

    def write(self, event: str, values: dict[str, Any]) -> None:
        """Print one event."""
        print(json.dumps({"event": event, **values}), file=self._stream, flush=True)

    def sink(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, Advanced):
                self._done[event.phase] = self._done.get(event.phase, 0) + event.size
                if monotonic() - self._last.get(event.phase, 0.0) >= JSON_EVERY:
                    self._last[event.phase] = monotonic()
                    self.write("progress", {"phase": event.phase, "bytes": self._done[event.phase]})
                return
            names = {PhaseStarted: "phase-started", PhaseFinished: "phase-finished", Message: "message"}
            self.write(names[type(event)], asdict(event))

    def error(self, error: UnshardError) -> None:
        values = {"code": error.code, "message": error.message, "hint": error.hint, "exit_code": error.exit_code}
        self.write("error", values)
