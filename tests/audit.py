"""Watches what the interpreter does while a hostile file is read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FORBIDDEN = (
    "import", "exec", "compile", "code.__new__", "function.__new__", "marshal.loads", "pickle.find_class", "os.system",
    "os.exec", "os.fork", "os.spawn", "os.posix_spawn", "os.putenv", "os.remove", "os.rename", "os.mkdir", "os.link",
    "subprocess.Popen", "socket.connect", "socket.__new__", "ctypes.dlopen", "shutil.rmtree", "urllib.Request",
    "webbrowser.open", "setattr", "object.__setattr__", "glob.glob", "mmap.__new__",
)  # fmt: skip
"""Audit events (Python documentation, "Audit events table") that reading a file must never cause."""

_seen: list[str] | None = None


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _seen is None:
        return
    if event in FORBIDDEN:
        _seen.append(f"{event} {args!r:.200}")
    elif event == "open":
        _seen.append(f"open {args[0]}")


sys.addaudithook(_hook)


@contextmanager
def watched(allowed_file: object) -> Iterator[None]:
    """Fail on anything done inside but opening the one allowed file."""
    global _seen
    seen = _seen = []
    try:
        yield
    finally:
        _seen = None
    done = [event for event in seen if event != f"open {allowed_file}"]
    assert not done, done
