"""Which directories hold the ranks of a checkpoint, over all its roots: by names alone.

| directory                       | ranks                                                                  |
|---------------------------------|------------------------------------------------------------------------|
| `mp_rank_TT`                    | tensor                                                                 |
| `mp_rank_TT_NNN`                | tensor, and pipeline or expert: whichever is parallel                   |
| `mp_rank_TT_PPP_EEE`            | tensor, pipeline, expert                                               |

In it lies `model_optim_rng.pt`; `model_rng.pt` of versions that kept the distributed optimizer in directories of its
own (`mp_rank_TT_PPP_DDD/optim.pt`, which hold no weights and are not looked at); or verl's first `model.pt`. Source:
Megatron-LM `megatron/training/checkpointing.py` (`get_checkpoint_name`; 23.04: `get_checkpoint_names`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from unshard.errors import IncompleteError, NotACheckpointError, UnshardError
from unshard.formats.contract import Source
from unshard.tensors import SourceFile

MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt", "model.pt")
"""Files with weights, in the order in which they are preferred."""

_DIRECTORY = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?")
_MAX_RANKS = 1 << 16
_MAX_TAIL = 3


@dataclass(frozen=True, slots=True)
class RankDirectory:
    """One rank's directory: `tensor` and the further `numbers` of its name, and its file of weights."""

    name: str
    tensor: int
    numbers: tuple[int, ...]
    path: Path
    file: SourceFile


@dataclass(slots=True)
class RankSet:
    """The rank directories of one checkpoint.

    directories: in the order of their numbers.
    roots:       where the files' roots lie.
    places:      directories that hold rank directories, the main one first.
    is_part:     whether the given path was one rank of several.
    """

    directories: list[RankDirectory] = field(default_factory=list)
    roots: dict[str, Path] = field(default_factory=dict)
    places: list[Path] = field(default_factory=list)
    is_part: bool = False
    problems: list[UnshardError] = field(default_factory=list)


def count_ranks(path: Path) -> tuple[int, bool]:
    """How many rank directories the checkpoint at exactly this path has, and whether the path is only one of them."""
    base = _base(path)
    return (0, False) if base is None else (len(list(_rank_directories(base))) or 1, base != path)


def collect_ranks(source: Source) -> RankSet:
    """The rank directories at `source.path`, beside it where it is one of them, and in the further roots.

    A further root may be given at any level that the main path has below it. Raises NotACheckpointError where no ranks
    lie at the path.
    """
    base = _base(source.path)
    if base is None:
        raise NotACheckpointError(f"{source.path}: no directories of Megatron ranks lie here")
    found = RankSet(roots={"source": base, **{name: path for name, path in source.roots.items() if name != "source"}})
    known: dict[str, RankDirectory] = {}
    for root, place in found.roots.items():
        here = base if root == "source" else _counterpart(place, base)
        if here is None:
            problem = f"{place}: no directories mp_rank_* lie here"
            found.problems.append(IncompleteError(problem, hint="leave this --also out, or mend it"))
            continue
        found.places.append(here)
        for name, file in _rank_directories(here):
            rank = _make_directory(name, file, SourceFile(root, file.relative_to(place).as_posix()))
            first = known.setdefault(name, rank)
            if first is not rank and not first.path.samefile(file):
                found.problems.append(
                    IncompleteError(
                        f"{name} is there twice: {first.path} and {file}",
                        hint="leave out the root or the directory that does not belong to this checkpoint",
                    )
                )
    if not known:  # a lone file that lies in no rank's directory
        known[source.path.name] = RankDirectory(
            source.path.name, 0, (), source.path, SourceFile("source", source.path.name)
        )
    found.directories = sorted(known.values(), key=lambda rank: (rank.tensor, rank.numbers))
    found.is_part = base != source.path and len(known) > 1
    return found


def _base(path: Path) -> Path | None:
    """The directory that holds the rank directories which `path` is, holds, or is one of; None if none of that."""
    if path.is_file():
        if path.name not in MODEL_FILES:
            return None
        if _DIRECTORY.fullmatch(path.absolute().parent.name):
            return path.absolute().parent.parent
        return path.parent if path.name != "model.pt" else None
    if _DIRECTORY.fullmatch(path.absolute().name) and _model_file(path) is not None:
        return path.absolute().parent
    return path if next(_rank_directories(path), None) is not None else None


def _rank_directories(directory: Path) -> Iterator[tuple[str, Path]]:
    """(name, file of weights) of the rank directories in a directory; those without weights are left out."""
    names = sorted([entry.name for entry in directory.iterdir() if _DIRECTORY.fullmatch(entry.name)])
    for name in names[:_MAX_RANKS]:
        file = _model_file(directory / name)
        if file is not None:
            yield name, file


def _model_file(directory: Path) -> Path | None:
    return next((directory / name for name in MODEL_FILES if (directory / name).is_file()), None)


def _make_directory(name: str, path: Path, file: SourceFile) -> RankDirectory:
    match = _DIRECTORY.fullmatch(name)
    tensor, *numbers = [int(number) for number in (match.groups() if match else ()) if number is not None]
    return RankDirectory(name, tensor, tuple(numbers), path, file)


def _counterpart(root: Path, base: Path) -> Path | None:
    """The directory under a further root that has rank directories."""
    parts = base.absolute().parts
    for count in range(min(_MAX_TAIL, len(parts)) + 1):
        place = root.joinpath(*parts[len(parts) - count :])
        if place.is_dir() and next(_rank_directories(place), None) is not None:
            return place
    return None
