"""What a command did, as a value: printed for people, or as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unshard.checkpoint import Note
from unshard.options import Weights


@dataclass(frozen=True, slots=True)
class Rounded:
    """A tensor whose values were rounded or computed: from which type to which, and what became of special values.

    `nan` counts NaN elements of the source; `overflow` finite elements that became infinite.
    """

    name: str
    source: str
    result: str
    elements: int
    nan: int = 0
    overflow: int = 0


@dataclass(frozen=True, slots=True)
class Verification:
    """How far the output was checked.

    mode:       "full", "sample" or "structure".
    compared:   bytes of contents read back and compared.
    proven, unproven: sentences.
    """

    mode: str
    compared: int
    seconds: float
    proven: tuple[str, ...]
    unproven: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """The report of a merge. Sizes in bytes, times in seconds, `rate` in bytes per second, `peak_memory` in bytes.

    checkpoint: what lay there, in one line.
    weights:    which copy of the parameters was taken, where the checkpoint keeps two.
    family:     the architecture that names and shapes were checked against; None: no family knows it.
    is_adapter: a PEFT adapter was written, without a base model.
    files:      (path, size) of every file, in the order in which they were published.
    dropped:    stored name → why the tensor is not in the output; skipped: the same for entries that are no tensors.
    """

    source: str
    output: str
    checkpoint: str
    family: str | None
    is_adapter: bool
    tensors: int
    parameters: int
    size: int
    files: tuple[tuple[str, int], ...]
    seconds: float
    write_seconds: float
    peak_memory: int
    verification: Verification
    weights: Weights | None = None
    notes: tuple[Note, ...] = ()
    rounded: tuple[Rounded, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return self.size / self.write_seconds if self.write_seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values, every figure in it."""
        return {
            "source": self.source,
            "output": self.output,
            "checkpoint": self.checkpoint,
            "weights": self.weights,
            "family": self.family,
            "is_adapter": self.is_adapter,
            "tensors": self.tensors,
            "parameters": self.parameters,
            "bytes": self.size,
            "files": [{"path": path, "bytes": size} for path, size in self.files],
            "seconds": round(self.seconds, 3),
            "write_seconds": round(self.write_seconds, 3),
            "bytes_per_second": round(self.rate),
            "peak_memory_bytes": self.peak_memory,
            "verification": {
                "mode": self.verification.mode,
                "bytes_compared": self.verification.compared,
                "seconds": round(self.verification.seconds, 3),
                "proven": list(self.verification.proven),
                "not_proven": list(self.verification.unproven),
            },
            "notes": [note_to_json(note) for note in self.notes],
            "rounded": [
                {
                    "tensor": entry.name,
                    "from": entry.source,
                    "to": entry.result,
                    "elements": entry.elements,
                    "nan": entry.nan,
                    "overflow": entry.overflow,
                }
                for entry in self.rounded
            ],
            "dropped": dict(self.dropped),
            "skipped": dict(self.skipped),
        }


def note_to_json(note: Note) -> dict[str, Any]:
    return {"level": note.level, "text": note.text, "tensors": list(note.tensors)}


def peak_memory() -> int:
    """The most memory that this process has had resident so far, in bytes.

    Linux says so in /proc; getrusage, the fallback, also counts what the process was before it became this program.
    """
    import resource
    import sys
    from pathlib import Path

    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
