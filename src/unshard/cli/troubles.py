"""Everything that can end a command early, as the error that is told; docs/reference/cli.md lists the exit codes."""

from __future__ import annotations

from unshard.cli.process import Terminated
from unshard.errors import UnshardError

CLOSED_PIPE = 141
"""The exit code of a command whose stdout nobody reads any more, as shells tell of SIGPIPE."""


class InterruptionError(UnshardError):
    """Ctrl-C."""

    exit_code = 130
    code = "interrupted"


class TerminationError(UnshardError):
    """SIGTERM."""

    exit_code = 143
    code = "terminated"


class SystemRefusalError(UnshardError):
    """The operating system did not do what was asked of it, outside all that is handled more precisely."""

    exit_code = 1
    code = "system"


class BugError(UnshardError):
    """Nothing that the user did."""

    exit_code = 70
    code = "bug"


def explain(error: BaseException, command: str) -> UnshardError:
    """What to tell the user of any error. `command` is the line that was typed."""
    if isinstance(error, UnshardError):
        return error
    if isinstance(error, KeyboardInterrupt):
        state, hint = (*error.args, None, None)[:2]
        kind = TerminationError if isinstance(error, Terminated) else InterruptionError
        return kind(f"{kind.code}: {state}" if state else kind.code, hint=hint)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return SystemRefusalError(f"{where}{error.strerror or error}")
    if isinstance(error, MemoryError):
        return SystemRefusalError("there is not enough memory", hint=f"{command} --memory 16MiB --jobs 1")
    debug = command if " --debug" in command else f"{command} --debug"
    return BugError(
        f"this is a bug in unshard: {type(error).__name__}: {error}",
        hint=f"report it together with what this prints: {debug}",
    )
