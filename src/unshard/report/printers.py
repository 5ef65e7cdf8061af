"""Where the words of a command go: results to stdout, all else to stderr; with `--json` everything to stdout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from threading import RLock
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from unshard.errors import OutputError, UnshardError
from unshard.report.console import make_console, print_line
from unshard.report.events import Advanced, Event, Message, PhaseFinished, PhaseStarted
from unshard.report.progress import Bars, Display, Lines, Phase

if TYPE_CHECKING:
    from rich.console import Console

    from unshard.checkpoint import Level

JSON_EVERY = 0.5
"""Seconds between two progress events in JSON."""

LEVELS: Mapping[Level, str] = {"note": "dim", "warning": "yellow"}
"""Levels of messages, with their styles."""


class ReaderGone(BaseException):
    """Nobody reads stdout any more (`unshard … | head`): the command stops, as after Ctrl-C."""


class Printer(Protocol):
    """A context: progress is shown between enter and exit. `sink` may be called from any thread."""

    def __enter__(self) -> Printer: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def sink(self, event: Event) -> None:
        """Take an event."""

    def result(self, event: str, values: Callable[[], dict[str, Any]], show: Callable[[Console], None]) -> None:
        """Print what a command found out: `show` it to people, or its `values` in JSON.

        Raises ReaderGone where stdout is a pipe that nobody reads, OutputError where it cannot be written to.
        """

    def error(self, error: UnshardError) -> None:
        """Say what went wrong."""


def choose_printer(*, as_json: bool, quiet: bool = False, verbose: bool = False) -> Printer:
    """The printer that fits the options and the terminal."""
    return JsonPrinter(sys.stdout) if as_json else PeoplePrinter(quiet=quiet, verbose=verbose)


class PeoplePrinter:
    """Text; progress as a bar on a terminal, else as a line now and then."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        self._quiet, self._verbose = quiet, verbose
        self._phases: dict[str, Phase] = {}
        self._display: Display | None = None
        self._stderr: Console | None = None
        self._lock = RLock()

    def __enter__(self) -> PeoplePrinter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._clear()

    def sink(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, Message):
                if self._shows(event.level):
                    self._say((f"{event.level}: ", LEVELS[event.level]), event.text)
            elif not self._quiet:
                self._advance(event)

    def result(self, event: str, values: Callable[[], dict[str, Any]], show: Callable[[Console], None]) -> None:
        self._clear()
        write_out(lambda: show(make_console(sys.stdout)), sys.stdout)

    def error(self, error: UnshardError) -> None:
        self._say(("error: ", "bold red"), error.message)
        if error.hint:
            self._say("\n", ("hint: ", "bold cyan"), error.hint)

    def _clear(self) -> None:
        """Leave no progress on the screen."""
        with self._lock:
            if self._display is not None:
                self._display.close()

    def _shows(self, level: Level) -> bool:
        return level == "warning" or self._verbose or not self._quiet

    def _say(self, *parts: str | tuple[str, str]) -> None:
        """A line on stderr. Where nobody reads it, the work goes on in silence."""
        try:
            print_line(self._console(), *parts)
        except OSError:
            self._quiet = True

    def _advance(self, event: PhaseStarted | Advanced | PhaseFinished) -> None:
        if self._display is None:
            self._display = self._choose_display()
        if isinstance(event, PhaseStarted):
            self._phases[event.phase] = Phase(event.phase, event.total)
            return
        phase = self._phases[event.phase]
        try:
            if isinstance(event, Advanced):
                phase.done += event.size
                self._display.show(phase)
            else:
                self._display.remove(phase)
        except OSError:
            self._quiet = True

    def _choose_display(self) -> Display:
        if not sys.stderr.isatty():
            return Lines(self._say)
        console = self._console()
        return Lines(self._say) if console.is_dumb_terminal else Bars(console)

    def _console(self) -> Console:
        """One for bars and messages, so that neither writes over the other."""
        if self._stderr is None:
            self._stderr = make_console(sys.stderr)
        return self._stderr


class JsonPrinter:
    """One JSON object a line; its member `event` says what it is (docs/reference/cli.md)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._phases: dict[str, Phase] = {}
        self._told: dict[str, float] = {}
        self._lock = RLock()

    def __enter__(self) -> JsonPrinter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Nothing to clean up: every line is flushed."""

    def sink(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, Message):
                self._write("message", asdict(event))
            elif isinstance(event, PhaseStarted):
                self._phases[event.phase] = Phase(event.phase, event.total)
                self._write("phase-started", {"phase": event.phase, "total_bytes": event.total})
            elif isinstance(event, Advanced):
                self._advance(self._phases[event.phase], event.size)
            else:
                done = self._phases[event.phase].done
                self._write("phase-finished", {"phase": event.phase, "bytes": done, "seconds": round(event.seconds, 3)})

    def result(self, event: str, values: Callable[[], dict[str, Any]], show: Callable[[Console], None]) -> None:
        self._write(event, values())

    def error(self, error: UnshardError) -> None:
        self._write("error", error_to_json(error))

    def _advance(self, phase: Phase, size: int) -> None:
        phase.done += size
        if monotonic() - self._told.get(phase.name, 0.0) < JSON_EVERY:
            return
        self._told[phase.name] = monotonic()
        left = phase.seconds_left
        self._write(
            "progress",
            {
                "phase": phase.name,
                "bytes": phase.done,
                "total_bytes": phase.total,
                "bytes_per_second": round(phase.rate),
                "seconds_left": None if left is None else round(left, 1),
            },
        )

    def _write(self, event: str, values: dict[str, Any]) -> None:
        line = json.dumps({"event": event, **values}, allow_nan=False)
        with self._lock:
            try:
                write_out(lambda: print(line, file=self._stream), self._stream)
            except OutputError as error:
                print(f"error: {error}", file=sys.stderr)
                raise


def error_to_json(error: UnshardError) -> dict[str, Any]:
    """An error's members; `problems` are those it consists of, if it tells of several."""
    problems = [problem_to_json(problem) for problem in error.problems]
    return {**problem_to_json(error), "exit_code": error.exit_code, "problems": problems}


def problem_to_json(problem: UnshardError) -> dict[str, Any]:
    """One problem: its kind, what is wrong, what to do."""
    return {"code": problem.code, "message": problem.message, "hint": problem.hint}


def write_out(write: Callable[[], object], stream: TextIO) -> None:
    """Write and flush. Raises ReaderGone for a closed pipe, OutputError for a full disk and its like."""
    try:
        write()
        stream.flush()
    except BrokenPipeError:
        _drop(stream)
        raise ReaderGone from None
    except OSError as error:
        _drop(stream)
        raise OutputError(f"stdout cannot be written to: {error.strerror}") from error


def _drop(stream: TextIO) -> None:
    """Let what is still in the stream's buffer go nowhere, or Python would try it again at its exit, and complain."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
