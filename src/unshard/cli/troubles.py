"""Everything that can end a command early: what is said about it, and the exit code."""

from __future__ import annotations

from unshard.cli.surroundings import Terminated
from unshard.errors import UnshardError
from unshard.report.printers import ReaderGone

REFUSED_BY_SYSTEM = 1
BUG = 70
INTERRUPTED = 130
CLOSED_PIPE = 141
TERMINATED = 143


def exit_code_of(error: BaseException) -> int:
    """The exit code; docs/reference/cli.md lists them."""
    if isinstance(error, UnshardError):
        return error.exit_code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 0
    for kind, code in _CODES.items():
        if isinstance(error, kind):
            return code
    return BUG


_CODES: dict[type[BaseException], int] = {
    ReaderGone: CLOSED_PIPE,
    Terminated: TERMINATED,
    KeyboardInterrupt: INTERRUPTED,
    OSError: REFUSED_BY_SYSTEM,
    MemoryError: REFUSED_BY_SYSTEM,
}
"""In this order: Terminated is a KeyboardInterrupt."""


def is_silent(error: BaseException) -> bool:
    """Whether nothing is to be said: argparse has printed its help, or nobody reads."""
    return isinstance(error, (SystemExit, ReaderGone))


def explain(error: BaseException, command: str) -> UnshardError:
    """What to tell the user of any error. `command` is the line that was typed."""
    if isinstance(error, UnshardError):
        return error
    if isinstance(error, KeyboardInterrupt):
        state, hint = (*error.args, None, None)[:2]
        what = "terminated" if isinstance(error, Terminated) else "interrupted"
        return UnshardError(f"{what}: {state}" if state else what, hint=hint)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return UnshardError(f"{where}{error.strerror or error}")
    if isinstance(error, MemoryError):
        return UnshardError("there is not enough memory", hint=f"{command} --memory 16MiB --jobs 1")
    return UnshardError(
        f"this is a bug in unshard: {type(error).__name__}: {error}",
        hint=f"report it together with what this prints: {command} --debug",
    )
