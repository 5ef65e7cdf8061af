"""What the tests of faults from the field share: merging, refusing, golden models under other names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unshard
from fsdp_bytes import Array, Mesh, write_ranks
from golden.tensor_files import Stored, read_tensors
from golden_set import COMMITTED
from unshard.report.events import Event
from unshard.report.report import Report

_NUMPY = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}


def merge(source: Path, output: Path, **options: Any) -> tuple[Report, dict[str, Stored]]:
    """Merge, and read what came out by hand."""
    report = unshard.merge(source, output, **options)
    return report, read_tensors(output)


def refuse(source: Path, output: Path, **options: Any) -> unshard.UnshardError:
    """The error of a merge that is refused before a byte is written."""
    events: list[Event] = []
    with pytest.raises(unshard.UnshardError) as caught:
        unshard.merge(source, output, sink=events.append, **options)
    assert events == []
    assert not output.exists()
    return caught.value


def words(report: Report) -> str:
    """All notes of a report."""
    return "\n".join(note.text for note in report.notes)


def warnings(report: Report) -> str:
    """The notes that are warnings."""
    return "\n".join(note.text for note in report.notes if note.level == "warning")


def same(found: Mapping[str, Stored], expected: Mapping[str, Array]) -> bool:
    """Whether these tensors came out under these names with these shapes and bits."""
    shapes = {name: tensor.shape for name, tensor in found.items()}
    return shapes == {name: array.shape for name, array in expected.items()} and all(
        found[name].data == array.tobytes() for name, array in expected.items()
    )


def copy_case(name: str, to: Path, part: str = "ckpt") -> Path:
    """A copy of a committed golden checkpoint, to be broken."""
    return Path(shutil.copytree(COMMITTED / name / part, to))


def truth(name: str, part: str = "truth") -> dict[str, Stored]:
    """The model that a committed golden checkpoint must become."""
    return read_tensors(COMMITTED / name / part)


def truth_arrays(name: str) -> dict[str, Array]:
    """The same as arrays."""
    return {key: np.frombuffer(t.data, _NUMPY[t.dtype]).reshape(t.shape) for key, t in truth(name).items()}


def rewrite_case(name: str, to: Path, mesh: Mesh, rename: Callable[[str], str]) -> Path:
    """A golden model as ranks under other names, with its config."""
    write_ranks(to, mesh, {rename(key): array for key, array in truth_arrays(name).items()})
    shutil.copytree(COMMITTED / name / "ckpt" / "huggingface", to / "huggingface")
    return to


def edit_json(path: Path, **changes: Any) -> None:
    """Set members of a JSON file; None removes them."""
    content = json.loads(path.read_text()) if path.exists() else {}
    content |= changes
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
