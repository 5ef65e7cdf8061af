"""The names under which frameworks save one file per rank.

| pattern                                    | written by                                                            |
|--------------------------------------------|-----------------------------------------------------------------------|
| `model_world_size_{W}_rank_{R}.pt`         | verl and its relatives EasyR1 and SkyRL                                |
| `pytorch_model_fsdp[_{i}]_rank{R}.bin`     | accelerate (LOCAL, and SHARDED without DCP)                           |
| `rank_{R}.pt`, `NAME_rank{R}.pt`, `NAME_r{R}.pt` | training scripts of one's own                                    |

Optimizer, scheduler and random states follow the same patterns and are left alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

_MAX_FILES = 1 << 16

_VERL = re.compile(r"(?P<prefix>model)_world_size_(?P<world>\d{1,7})_rank_(?P<rank>\d{1,7})\.(?P<suffix>pt)")
_ACCELERATE = re.compile(r"(?P<prefix>pytorch_model_fsdp(?:_\d{1,4})?)_rank(?P<rank>\d{1,7})\.(?P<suffix>bin)")
_GENERIC = re.compile(
    r"(?:(?P<prefix>[\w.+=-]*?)[_.-])?(?:rank[_-]?|r)(?P<rank>\d{1,7})\.(?P<suffix>pt|pth|bin)", re.IGNORECASE
)
_WORLD_IN_PREFIX = re.compile(r"world[_-]?size", re.IGNORECASE)
_OTHER_STATES = re.compile(
    r"(^|[_.-])(opt|optim|optims|optimizer|optimizers|extra|sched|scheduler|rng|random|scaler|data|dataloader|trainer"
    r"|zero|mp|pp|expp)([_.-]|\d|$)",
    re.IGNORECASE,
)


@dataclass(slots=True)
class RankFiles:
    """Files of one state dict, one per rank, that lie in one place.

    pattern: for people: `model_world_size_4_rank_*.pt`.
    layout:  "verl", "accelerate" or "ranks".
    world:   the world size in the names, or None where names have none.
    ranks:   rank → its file.
    doubles: further files that claim the same ranks ("rank_1.pt" beside "rank_01.pt").
    """

    pattern: str
    layout: str
    world: int | None = None
    ranks: dict[int, Path] = field(default_factory=dict)
    doubles: list[tuple[int, Path]] = field(default_factory=list)


def find_rank_files(directory: Path) -> list[RankFiles]:
    """The groups of rank files in a directory, verl's first. verl's files of several world sizes are one group each."""
    groups: dict[tuple[int, str], RankFiles] = {}
    for number, path in enumerate(sorted(_files_in(directory))):
        if number >= _MAX_FILES:
            break
        found = _match(path.name)
        if found is None:
            continue
        order, layout, pattern, rank, world = found
        group = groups.setdefault((order, pattern), RankFiles(pattern, layout, world))
        if group.ranks.setdefault(rank, path) != path:
            group.doubles.append((rank, path))
    return [groups[key] for key in sorted(groups) if _is_group(groups[key])]


def group_of(file: Path) -> RankFiles | None:
    """The group of rank files that a file belongs to, or None."""
    for group in find_rank_files(file.parent):
        if any(path.name == file.name for path in (*group.ranks.values(), *[path for _, path in group.doubles])):
            return group
    return None


def _is_group(group: RankFiles) -> bool:
    """Whether the numbers are ranks: a `deepseek_r1.pt` by itself is a name."""
    return group.layout != "ranks" or len(group.ranks) > 1 or 0 in group.ranks


def _files_in(directory: Path) -> list[Path]:
    try:
        return [path for path in directory.iterdir() if path.is_file()]
    except OSError:
        return []


def _match(name: str) -> tuple[int, str, str, int, int | None] | None:
    """(order, layout, pattern, rank, world size) of a file name, or None."""
    for order, (layout, expression) in enumerate((("verl", _VERL), ("accelerate", _ACCELERATE), ("ranks", _GENERIC))):
        match = expression.fullmatch(name)
        if match is None:
            continue
        prefix = match["prefix"] or ""
        if layout == "ranks" and (_OTHER_STATES.search(prefix) or _WORLD_IN_PREFIX.search(prefix)):
            return None
        world = int(match["world"]) if layout == "verl" else None
        start, end = match.span("rank")
        return order, layout, f"{name[:start]}*{name[end:]}", int(match["rank"]), world
    return None
