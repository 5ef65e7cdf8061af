"""The public functions, with paths and keywords as people write them in Python."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

from unshard.errors import raise_all
from unshard.lazy import CheckpointView, LazyTensor
from unshard.merging import merge as _merge
from unshard.opening import open_checkpoint
from unshard.options import MergeOptions, Weights
from unshard.plan.moves import Plan
from unshard.preparing import prepare
from unshard.report.events import Sink, ignore
from unshard.report.report import Report
from unshard.settings import Settings
from unshard.verify.against import Verdict, verify_against
from unshard.verify.compare import Tolerance

AnyPath: TypeAlias = str | os.PathLike[str]


def open(
    path: AnyPath,
    *,
    also: AnyPath | Iterable[AnyPath] = (),
    config: AnyPath | None = None,
    shapes_from: AnyPath | None = None,
    weights: Weights | None = None,
) -> CheckpointView:
    """The checkpoint at or below `path`, as a mapping of stored names to lazy tensors.

    also:        further directories with pieces of the same checkpoint.
    config:      a directory or file whose config.json counts instead of the checkpoint's own.
    shapes_from: a reference model, for shapes that are not stored: FSDP1 flat parameters, torch's safetensors shards.
    weights:     "master" or "model", where the checkpoint keeps its parameters twice; None: masters.

    Raises an UnshardError where nothing readable lies there, and where pieces are missing or contradict each other.
    """
    options = _make_options({"also": also, "config": config, "shapes_from": shapes_from, "weights": weights})
    checkpoint = open_checkpoint(Path(path), options)
    raise_all(checkpoint.problems)
    return CheckpointView(checkpoint)


def plan(source: AnyPath, **options: Any) -> Plan:
    """The plan of a merge; nothing is written. Keywords are the fields of `unshard.options.MergeOptions`."""
    return prepare(Path(source), _make_options(options)).plan


def merge(source: AnyPath, output: AnyPath, *, sink: Sink = ignore, **options: Any) -> Report:
    """Write the Hugging Face model of a checkpoint, verify it and report.

    `sink` receives the events of `unshard.report.events`, from several threads; the other keywords are the fields of
    `unshard.options.MergeOptions`. Raises an UnshardError; then nothing that looks whole is left behind.
    """
    return _merge(Path(source), Path(output), _make_options(options), sink)


def verify(
    output: AnyPath,
    against: AnyPath | None = None,
    *,
    atol: float | None = None,
    rtol: float | None = None,
    min_cosine: float | None = None,
    sink: Sink = ignore,
    **options: Any,
) -> Verdict:
    """Check a merged model: its structure alone, or every tensor against its source or another model.

    Equal bits are the default; `atol`, `rtol` (as in numpy's allclose) and `min_cosine` loosen it. Of the options,
    those that change what a merge writes matter where a side is a checkpoint. Differences are in the verdict (`holds`,
    `comparison`); an UnshardError is raised where a side cannot be read or is damaged.
    """
    place = Path(against) if against is not None else None
    tolerance = Tolerance(atol, rtol, min_cosine)
    return verify_against(Path(output), place, tolerance, _make_options(options), sink)


def _make_options(given: dict[str, Any]) -> MergeOptions:
    """Keywords of `MergeOptions`, with strings where it has paths."""
    given = dict(given)
    for name in ("config", "tokenizer", "map", "shapes_from", "fill_from"):
        if given.get(name) is not None:
            given[name] = Path(given[name])
    if "also" in given:
        also = given["also"]
        given["also"] = tuple([Path(path) for path in ([also] if isinstance(also, (str, os.PathLike)) else also)])
    if "names" in given:
        given["names"] = os.fspath(given["names"])
    return MergeOptions(**given)


__all__ = ["CheckpointView", "LazyTensor", "Plan", "Report", "Settings", "Verdict", "merge", "open", "plan", "verify"]
