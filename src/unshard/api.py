"""The public functions, with paths and keywords as people write them in Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unshard.lazy import CheckpointView
from unshard.merging import merge as _merge
from unshard.merging import prepare
from unshard.opening import open_checkpoint
from unshard.options import MergeOptions
from unshard.plan.moves import Plan
from unshard.report.events import Sink, ignore
from unshard.report.report import Report
from unshard.settings import Settings
from unshard.verify.against import Verdict, verify_against
from unshard.verify.compare import Tolerance

_PATHS = ("config", "shapes_from")


def _options(given: dict[str, Any]) -> MergeOptions:
    """Keywords of `MergeOptions`, with strings where paths are meant."""
    given = dict(given)
    for name in _PATHS:
        if given.get(name) is not None:
            given[name] = Path(given[name])
    if "also" in given:
        given["also"] = tuple([Path(path) for path in given["also"]])
    return MergeOptions(**given)


def open(path: str | Path, *, also: Sequence[str | Path] = (), shapes_from: str | Path | None = None) -> CheckpointView:
    """The checkpoint at or below `path`, as a mapping of stored names to lazy tensors.

    Raises an UnshardError where nothing readable lies there, and where pieces are missing or contradict each other.
    """
    from unshard.errors import raise_all

    checkpoint = open_checkpoint(Path(path), _options({"also": also, "shapes_from": shapes_from}))
    raise_all(checkpoint.problems)
    return CheckpointView(checkpoint)


def plan(source: str | Path, **options: Any) -> Plan:
    """The plan of a merge; nothing is written. Keywords are the fields of `unshard.options.MergeOptions`."""
    return prepare(Path(source), _options(options)).plan


def merge(source: str | Path, output: str | Path, *, sink: Sink = ignore, **options: Any) -> Report:
    """Write the Hugging Face model of a checkpoint, verify it and report.

    `sink` receives the events of `unshard.report.events`; the other keywords are the fields of
    `unshard.options.MergeOptions`.
    """
    return _merge(Path(source), Path(output), _options(options), sink)


def verify(
    output: str | Path,
    against: str | Path | None = None,
    *,
    atol: float | None = None,
    rtol: float | None = None,
    min_cosine: float | None = None,
    sink: Sink = ignore,
    **options: Any,
) -> Verdict:
    """Check a merged model: its structure alone, or every tensor against its source or another model."""
    place = Path(against) if against is not None else None
    tolerance = Tolerance(atol, rtol, min_cosine)
    return verify_against(Path(output), place, tolerance, _options(options), sink)


__all__ = ["CheckpointView", "Plan", "Report", "Settings", "merge", "open", "plan", "verify"]
