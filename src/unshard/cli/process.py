"""What the process finds around it: streams that may be closed or know few letters, and signals."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM, as schedulers send it, or SIGHUP, when a terminal goes away: cleaned up after like Ctrl-C."""


_ENDINGS = (signal.SIGTERM, signal.SIGHUP)


def prepare_streams() -> None:
    """Make stdout and stderr writable whatever they are: closed ones swallow, letters they lack become escapes."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def terminable() -> Iterator[None]:
    """Let both raise Terminated inside the `with`, unless somebody else handles them, or ignores them (nohup)."""
    in_main = threading.current_thread() is threading.main_thread()
    usual = [number for number in _ENDINGS if in_main and signal.getsignal(number) == signal.SIG_DFL]
    for number in usual:
        signal.signal(number, _terminate)
    try:
        yield
    finally:
        for number in usual:
            signal.signal(number, signal.SIG_DFL)


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise Terminated
