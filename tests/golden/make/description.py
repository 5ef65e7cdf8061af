"""`case.json`: how a golden checkpoint was made, and what must come out of it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from pathlib import Path
from typing import Protocol

from golden_set import Run

_TOP = ("name", "about", "source", "runs")


class Described(Protocol):
    """A line of a table of cases: a dataclass."""

    name: str
    about: str
    source: str

    def all_runs(self) -> tuple[Run, ...]:
        """What is typed, and what must come of it."""
        ...


def describe(case: Described, directory: Path, packages: tuple[str, ...]) -> None:
    """Write the file: the case's fields, and the versions of the packages that wrote the checkpoint."""
    facts: dict[str, object] = {name: getattr(case, name) for name in _TOP if name != "runs"}
    facts["runs"] = [dataclasses.asdict(run) for run in case.all_runs()]
    facts["made"] = {name: value for name, value in dataclasses.asdict(case).items() if name not in _TOP}
    facts["versions"] = {package: importlib.metadata.version(package) for package in packages}
    (directory / "case.json").write_text(json.dumps(facts, indent=1) + "\n")
