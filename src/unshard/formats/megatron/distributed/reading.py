"""Reads a distributed checkpoint into the canonical catalog, and says everything at once that is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unshard.checkpoint import Checkpoint
from unshard.errors import IncompleteError, UnshardError, command_line
from unshard.formats.contract import Source
from unshard.formats.megatron.beside import look_beside
from unshard.formats.megatron.distributed.canonical import to_canonical
from unshard.formats.megatron.distributed.common import COMMON_ITEM, read_common
from unshard.formats.megatron.distributed.stored import Stored
from unshard.formats.megatron.facts import read_facts
from unshard.formats.megatron.names import Skipped, kind_without_weights
from unshard.parallel import ARGUMENTS
from unshard.words import ranges_in_words

ROOT = "source"
_ITERATION = re.compile(r"iter_(\d{7,18})")
_LAYER = re.compile(r"decoder\.layers\.(\d{1,9})\..*")
_READ_ITEMS = frozenset({COMMON_ITEM, "args", "iteration"})


def is_weight(key: str) -> bool:
    """Whether a key may be a parameter of the model, so that its tensor must be read."""
    return kind_without_weights(key) is None


def to_checkpoint(source: Source, stored: Stored, format_name: str, title: str) -> Checkpoint:
    """The catalog of what a backend found at `source.path`; `title` names the kind of checkpoint."""
    place = source.path
    problems = list(stored.problems)
    common = read_common(place, ROOT, stored.items, problems) or {}
    beside = look_beside(place)
    own = {name: value for name, value in read_facts(common.get("args")).items() if value is not None}
    facts = {**beside.facts, **own}
    tensors, wrong = to_canonical(stored.tensors)
    problems += [*wrong, *_check_layers(tensors, facts), *_check_iteration(place, common)]
    if not tensors and not problems:
        problems.append(IncompleteError(f"{place}: no tensor of a model is stored here, only other states"))
    mesh = _mesh(facts)
    checkpoint = Checkpoint(
        format=format_name,
        title=_title(title, common, mesh),
        roots=source.roots,
        tensors=tensors,
        world_size=_count(facts.get("world_size")),
        mesh=mesh,
        dialect="megatron",
        facts=own,
        skipped=_skipped(stored.left_out),
        notes=tuple(stored.notes),
        problems=tuple(problems),
    )
    return beside.around(checkpoint)


def _check_layers(names: Mapping[str, object], facts: Mapping[str, Any]) -> Sequence[UnshardError]:
    """A problem where another number of layers is stored than training recorded. Not all need an adapter."""
    base = [name for name in names if ".adapter." not in name]
    layers = {int(found[1]) for name in base if (found := _LAYER.fullmatch(name))}
    recorded = _count(facts.get("num_layers"))
    if not layers or recorded in (None, max(layers) + 1):
        return ()
    return (
        IncompleteError(
            f"training recorded {recorded} layers, but layers {ranges_in_words(layers)} are stored",
            hint="files of different runs are mixed, or the save was cut short: take another checkpoint",
        ),
    )


def _check_iteration(place: Path, common: Mapping[Any, Any]) -> Sequence[UnshardError]:
    """A problem where the directory is named after another iteration than the one that is recorded inside."""
    recorded, named = common.get("iteration"), _ITERATION.fullmatch(place.name)
    if named is None or type(recorded) is not int or recorded == int(named[1]):
        return ()
    return (
        IncompleteError(
            f"{place} is named after iteration {int(named[1])}, but holds what was recorded at iteration {recorded}: "
            "files of two iterations are mixed, or the directory was renamed",
            hint="if it was renamed: " + command_line("mv", place, place.with_name(f"iter_{recorded:07d}")),
        ),
    )


def _mesh(facts: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """The kinds of parallelism with more than one rank; `etp` where experts are shared otherwise than dense layers."""
    sizes = {axis: _count(facts.get(name)) or 1 for axis, name in ARGUMENTS.items()}
    shared = sizes.pop("etp") if facts.get("expert_tensor_parallel_size") else sizes["tp"]
    dims = tuple([(axis, size) for axis, size in sizes.items() if size > 1])
    return (*dims, ("etp", shared)) if facts.get("num_experts") and shared != sizes["tp"] else dims


def _count(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _title(kind: str, common: Mapping[Any, Any], mesh: Sequence[tuple[str, int]]) -> str:
    """One line for people: "Megatron-Core torch_dist, iteration 10, mesh (tp=2, pp=2)"."""
    parts = [kind]
    if type(iteration := common.get("iteration")) is int:
        parts.append(f"iteration {iteration}")
    if mesh:
        parts.append("mesh (" + ", ".join([f"{name}={size}" for name, size in mesh]) + ")")
    return ", ".join(parts)


def _skipped(keys: Sequence[str]) -> Mapping[str, str]:
    skipped = Skipped()
    for key in keys:
        if key not in _READ_ITEMS and not skipped.take(key):
            skipped.add(re.split(r"[./]", key, maxsplit=1)[0], "an object, no tensor")
    return skipped.lines()
