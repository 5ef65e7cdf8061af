"""The knobs of a run, in one place."""

from __future__ import annotations

import os
from dataclasses import dataclass, field


def _available_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else (os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Settings:
    """How a plan is run. Nothing here changes a byte of the output.

    jobs:   worker threads. They spread over the output files first, then share those that are left.
    memory: bytes that all buffers together may take. A single task larger than that is still admitted, alone.
    buffer: bytes of one tile buffer. About the size of a core's second-level cache; larger is slower.
    """

    jobs: int = field(default_factory=lambda: min(4, _available_cores()))
    memory: int = 64 << 20
    buffer: int = 1 << 20
