"""From the path that a person typed to the directory (or file) that holds the checkpoint, and to its format."""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from unshard.errors import FormatError, NotACheckpointError, UnshardError, command_line
from unshard.formats import FORMATS
from unshard.formats.contract import Format
from unshard.formats.foreign import name_foreign
from unshard.formats.megatron.train_state import read_step
from unshard.formats.megatron.verl import find_role_above
from unshard.words import items_in_lines, items_in_words

_MAX_DEPTH = 4
_MAX_DIRECTORIES = 4096
_NEVER_ENTERED = re.compile(
    r"\..*|__pycache__|huggingface|wandb|tensorboard|runs|optim(izer)?(_\d+)?|extra(_state)?|(data)?loader|rng"
    r"|lora_adapter|rollout.*"
)
_PIECES = re.compile(
    r"(__\d+)?\.metadata(\.tmp)?|metadata\.json|common\.pt|.+\.distcp|shard-\d+-model-\d+-of-\d+\.safetensors"
)
"""Files of distributed checkpoints (torch's DCP, Megatron-Core's), none of which can be read by itself."""
_STEP = re.compile(r"[0-9]{1,18}")
_RELEASE = "release"
"""What Megatron-LM's tracker says of a model that was converted, not trained; so is its directory named."""
_MAX_TRACKER = 1 << 16
_TRACKERS = {
    "latest_checkpointed_iteration.txt": None,
    "latest_ckpt_global_step.txt": None,
    "checkpoint_tracker.json": "last_global_step",
    "latest_train_state.pt": "step",
}
"""Files of verl (and Megatron-LM), SkyRL, EasyR1 and Megatron-Bridge that name the latest step; the key where there is
one, in JSON or in a torch file."""
_STEP_NAMES = ("global_step_{}", "global_steps_{}", "iter_{:07d}", "step-{}", "step_{}", "checkpoint-{}")


def locate(path: Path, also: Sequence[Path] = ()) -> tuple[Format, Path]:
    """The format and the place of the checkpoint at or below `path`: a run, a step, a role (`actor`), a single file.

    Where a run names its latest step (verl, SkyRL and EasyR1 each in a file of their own), that step is taken. `also`
    are further roots, which only have to be there. A part that means nothing by itself, one file of several or one
    directory of a role, stands for the whole. Raises NotACheckpointError where nothing lies that can be read, with
    what does lie there, and where several checkpoints do, with all of them.
    """
    for place in (path, *also):
        if not place.exists():
            raise NotACheckpointError(f"`{place}` does not exist", hint=command_line("ls", _existing_parent(place)))
    whole = _whole(path)
    found = detect(whole)
    if found is not None:
        return found, whole
    if path.is_file():
        raise NotACheckpointError(f"{path}: not a checkpoint file: {name_foreign(path) or 'of no kind that is known'}")
    read_tracker(path)
    walk = _walk(path)
    if len(walk.candidates) == 1:
        return walk.candidates[0]
    if walk.candidates:
        raise _several(path, walk.candidates)
    raise _nothing(path, walk)


def _whole(path: Path) -> Path:
    """The checkpoint that a path is a part of, where the part means nothing by itself; else the path.

    `__0_0.distcp` and its like stand for their directory, `dist_ckpt` and `model` for verl's directory of a role.
    Raises NotACheckpointError for parts without weights.
    """
    if path.is_file():
        if not _PIECES.fullmatch(path.name):
            return path
        found = detect(path.absolute().parent)
        if found is None or not (found.name in ("dcp", "hf_shards") or found.name.startswith("megatron")):
            return path
        path = path.absolute().parent
    try:
        role = find_role_above(path)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from error
    return path if role is None else role.place


def detect(path: Path) -> Format | None:
    """The first registered format that recognises exactly this path. Raises FormatError where that cannot be seen."""
    try:
        return next((candidate for candidate in FORMATS if candidate.detect(path) is not None), None)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class Tracker:
    """A file in which a run names its latest checkpoint: `file` says `step`, which lies in `directory`."""

    file: Path
    step: int | str
    directory: Path


def read_tracker(run: Path) -> Tracker | None:
    """What a run directory says of its latest step, or None. Raises NotACheckpointError if that step is not there."""
    for name, key in _TRACKERS.items():
        step = _read_step(run / name, key)
        if step is None:
            continue
        places = [run / (step if isinstance(step, str) else pattern.format(step)) for pattern in _STEP_NAMES]
        place = next((place for place in places if place.is_dir()), None)
        if place is not None:
            return Tracker(run / name, step, place)
        steps = [child for child in _directories_in(run) if child.name[-1].isdigit()]
        usual = next((place for place in places if any(_same_kind(place, child) for child in steps)), places[0])
        raise NotACheckpointError(
            f"{run / name} says that step {step} is the latest, but neither {usual.name} nor another directory of "
            "that step is there",
            hint="name a step that is there: " + command_line("unshard", "inspect", steps[-1])
            if steps
            else command_line("ls", run),
        )
    return None


def _same_kind(directory: Path, other: Path) -> bool:
    """Whether two directories of steps are named in the same way."""
    return directory.name.rstrip("0123456789") == other.name.rstrip("0123456789")


def _read_step(file: Path, key: str | None) -> int | str | None:
    """The step in a tracker: the whole text (a number or `release`), or the member `key` of a JSON object."""
    if not file.is_file():
        return None
    if file.suffix == ".pt":
        return read_step(file)
    try:
        with file.open("rb") as stream:
            text = stream.read(_MAX_TRACKER).decode().strip()
        step = str(text if key is None else json.loads(text)[key])
    except (ValueError, KeyError, TypeError, OSError, RecursionError):
        return None
    if key is None and step == _RELEASE:
        return step
    return int(step) if _STEP.fullmatch(step) else None


def explain(path: Path, place: Path) -> str:
    """Why `place` was taken when `path` was given, as a sentence for the report."""
    for directory in (parent for parent in place.parents if parent == path or path in parent.parents):
        tracker = read_tracker(directory)
        if tracker is not None:
            return f"`{path}` was given; {tracker.file.name} says step {tracker.step}; the checkpoint is `{place}`"
    return f"`{path}` was given; the checkpoint is `{place}`"


@dataclass(slots=True)
class _Walk:
    """What a walk down a directory tree found. `foreign`: places of kinds that cannot be read, with what they are."""

    candidates: list[tuple[Format, Path]] = field(default_factory=list)
    foreign: list[tuple[Path, str]] = field(default_factory=list)
    cut_short: bool = False


def _walk(start: Path) -> _Walk:
    """Breadth first, no deeper than a run needs, never twice into the same directory, never below a checkpoint."""
    walk = _Walk()
    seen: set[tuple[int, int]] = set()
    waiting = deque([(start, 0)])
    while waiting:
        directory, depth = waiting.popleft()
        if len(seen) >= _MAX_DIRECTORIES:
            walk.cut_short = True
            break
        try:
            facts = directory.stat()
        except OSError:
            continue
        if (facts.st_dev, facts.st_ino) in seen:
            continue
        seen.add((facts.st_dev, facts.st_ino))
        try:
            found = detect(directory)
        except FormatError:  # among others, one that may not be entered is nothing
            continue
        if found is not None:
            walk.candidates.append((found, directory))
            continue
        foreign = name_foreign(directory)
        if foreign is not None:
            walk.foreign.append((directory, foreign))
        if depth < _MAX_DEPTH:
            waiting += [(child, depth + 1) for child in _children(directory)]
    return walk


def _children(directory: Path) -> Iterator[Path]:
    """The directories to look into: of a run that names its latest step, only that."""
    try:
        tracker = read_tracker(directory)
    except NotACheckpointError:
        tracker = None
    if tracker is not None:
        yield tracker.directory
    else:
        yield from _directories_in(directory)


def _directories_in(directory: Path) -> list[Path]:
    """The directories in a directory that may hold a checkpoint, step 9 before step 10."""
    try:
        entries = [entry.name for entry in os.scandir(directory) if _is_directory(entry)]
    except OSError:
        return []
    return [directory / name for name in sorted(entries, key=_natural) if not _NEVER_ENTERED.fullmatch(name)]


def _is_directory(entry: os.DirEntry[str]) -> bool:
    """Links are followed; a link to itself is no directory."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key by which step 9 comes before step 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,18})", name)]


def _several(start: Path, candidates: Sequence[tuple[Format, Path]]) -> UnshardError:
    found = items_in_lines([f"{place}: {kind.detect(place)}" for kind, place in candidates])
    return NotACheckpointError(
        f"{len(candidates)} checkpoints lie below {start}:\n{found}",
        hint="name the one that is meant: " + command_line("unshard", "inspect", candidates[-1][1]),
    )


def _nothing(path: Path, walk: _Walk) -> UnshardError:
    """The error of a place without a checkpoint: what lies there instead, and where one might be."""
    above = next((parent for parent in list(path.absolute().parents)[:2] if _is_checkpoint(parent)), None)
    hint = command_line("ls", path)
    if above is not None:
        hint = "a checkpoint lies above: " + command_line("unshard", "inspect", above)
    if walk.foreign:
        found = items_in_lines([f"{place}: {what}" for place, what in walk.foreign])
        return NotACheckpointError(f"{path}: no checkpoint that can be read, but\n{found}", hint=hint)
    limit = f" in its first {_MAX_DIRECTORIES} directories" if walk.cut_short else ""
    files = sorted([entry.name for entry in islice(path.iterdir(), _MAX_DIRECTORIES)], key=_natural)
    there = items_in_words(files) or "nothing"
    return NotACheckpointError(f"{path}: no checkpoint was found{limit}; in it lies {there}", hint=hint)


def _is_checkpoint(path: Path) -> bool:
    try:
        return detect(path) is not None
    except FormatError:
        return False


def _existing_parent(path: Path) -> Path:
    return next((parent for parent in path.parents if parent.exists()), Path())
