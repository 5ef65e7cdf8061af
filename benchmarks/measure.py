"""Running a command: wall time from start to exit, and the peak of the memory of all its processes together."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

_PAGE = os.sysconf("SC_PAGE_SIZE")
_INTERVAL = 0.01
"""Seconds between two looks at the process tree."""


@dataclass(frozen=True)
class Measurement:
    """Wall seconds, and bytes resident at the peak, summed over the process tree."""

    seconds: float
    memory: int


def measure(command: Sequence[str] | str, environment: dict[str, str] | None = None) -> Measurement:
    """Run a command (a string goes through the shell). Raises RuntimeError with its output where it fails."""
    started = time.perf_counter()
    process = subprocess.Popen(
        command,
        shell=isinstance(command, str),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(environment or {})},
        text=True,
    )
    peak, ended = [0], Event()
    watcher = Thread(target=_watch, args=(process.pid, peak, ended))
    watcher.start()
    output, _ = process.communicate()
    seconds = time.perf_counter() - started
    ended.set()
    watcher.join()
    if process.returncode:
        raise RuntimeError(f"{command} exited with {process.returncode}:\n{output[-3000:]}")
    return Measurement(seconds, peak[0])


def _watch(root: int, peak: list[int], ended: Event) -> None:
    while not ended.wait(_INTERVAL):
        peak[0] = max(peak[0], sum([_resident(process) for process in _tree(root)]))


def _tree(root: int) -> list[int]:
    """A process and all that descend from it."""
    found, unseen = [], [root]
    while unseen:
        process = unseen.pop()
        found.append(process)
        try:
            for task in Path(f"/proc/{process}/task").iterdir():
                unseen += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found


def _resident(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0
