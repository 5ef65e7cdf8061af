"""Which files hold the ranks of a checkpoint, over all its roots."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from unshard.checkpoint import Note
from unshard.errors import IncompleteError, NotACheckpointError, UnshardError, command_line
from unshard.formats.contract import Source
from unshard.formats.fsdp.layouts import RankFiles, find_rank_files, group_of
from unshard.tensors import SourceFile
from unshard.words import items_in_lines, ranks_in_words

_STEP = re.compile(r"(?:global_step|global_steps|checkpoint|step|iter)[_-]?(\d+)")
_MAX_TAIL = 3


@dataclass(frozen=True, slots=True)
class RankFile:
    """One rank's file: where it is, and how the catalog names it."""

    path: Path
    file: SourceFile


@dataclass(slots=True)
class RankSet:
    """The rank files of one checkpoint.

    group:       the layout and name pattern that they follow.
    ranks:       rank → its file.
    directories: where rank files (or only side files) were found, the main one first.
    problems:    files that contradict each other by name or place.
    """

    group: RankFiles
    ranks: dict[int, RankFile] = field(default_factory=dict)
    directories: list[Path] = field(default_factory=list)
    problems: list[UnshardError] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)


def choose_group(
    groups: list[RankFiles], directory: Path, stated_world: int | None
) -> tuple[RankFiles, list[RankFiles]]:
    """The group to read, and the others of the same layout that it is mixed with.

    verl's names are unmistakable, so that files of other worlds beside them are a fault, not a choice. Raises
    NotACheckpointError that lists the groups where names leave it open which one is meant.
    """
    verl = [group for group in groups if group.layout == "verl"]
    if verl:
        verl.sort(key=lambda group: (group.world == stated_world, len(group.ranks) == group.world, len(group.ranks)))
        return verl[-1], verl[:-1]
    if len(groups) == 1:
        return groups[0], []
    raise several_groups(groups, directory)


def several_groups(groups: list[RankFiles], directory: Path) -> NotACheckpointError:
    """The error of a directory with several checkpoints in rank files."""
    listed = items_in_lines([f"{group.pattern} ({ranks_in_words(group.ranks)})" for group in groups])
    example = groups[0].ranks[min(groups[0].ranks)]
    return NotACheckpointError(
        f"{directory}: rank files of several checkpoints lie here:\n{listed}",
        hint="name one file of the checkpoint that is meant: " + command_line("unshard", "inspect", example),
    )


def collect_ranks(source: Source, stated_world: int | None) -> RankSet:
    """The rank files at `source.path` and in the further roots.

    `stated_world` is what `fsdp_config.json` says. A further root may be given at any level that the main path has
    below it: with `run/global_step_5/actor` as the main path, `/node1/run` finds `/node1/run/global_step_5/actor`.
    """
    roots = source.roots
    directory = roots["source"]
    group, mixed = _main_group(source, directory, stated_world)
    found = RankSet(group)
    for other in mixed:
        found.problems.append(
            IncompleteError(
                f"{directory}: files of a world of {other.world} ({ranks_in_words(other.ranks)}) are mixed with those "
                f"of a world of {group.world} ({ranks_in_words(group.ranks)})",
                hint="move the files of the other run away, or name a file of the right one",
            )
        )
    for root, place in roots.items():
        here = directory if root == "source" else _counterpart(place, directory, group)
        if here is None:
            found.problems.append(
                IncompleteError(f"{place}: no files {group.pattern} lie here", hint="leave this --also out, or mend it")
            )
            continue
        found.directories.append(here)
        _add_group(found, root, place, here)
    _check_steps(found)
    return found


def _main_group(source: Source, directory: Path, stated_world: int | None) -> tuple[RankFiles, list[RankFiles]]:
    """The group of the path's file, or else of its directory, or of the first further root that has one."""
    if source.path.is_file():
        group = group_of(source.path)
        if group is None:
            raise NotACheckpointError(f"{source.path}: not the file of a rank")
        return group, []
    for place in (directory, *source.also):
        groups = find_rank_files(place)
        if groups:
            return choose_group(groups, place, stated_world)
    raise NotACheckpointError(f"{directory}: no rank files lie here")


def _counterpart(root: Path, directory: Path, group: RankFiles) -> Path | None:
    """The directory under a further root that has files of the group."""
    parts = directory.absolute().parts
    for count in range(min(_MAX_TAIL, len(parts)) + 1):
        place = root.joinpath(*parts[len(parts) - count :])
        if any(other.pattern == group.pattern for other in find_rank_files(place)):
            return place
    return None


def _add_group(found: RankSet, root: str, place: Path, here: Path) -> None:
    """Add the files of the group in directory `here`, which lies under the root `place`."""
    for group in find_rank_files(here):
        if group.pattern != found.group.pattern:
            continue
        for rank, path in [*sorted(group.ranks.items()), *group.doubles]:
            known = found.ranks.get(rank)
            if known is None:
                found.ranks[rank] = RankFile(path, SourceFile(root, path.relative_to(place).as_posix()))
            elif not known.path.samefile(path):
                found.problems.append(
                    IncompleteError(
                        f"rank {rank} is there twice: {known.path} and {path}",
                        hint="leave out the root or the file that does not belong to this checkpoint",
                    )
                )


def _check_steps(found: RankSet) -> None:
    """Add a problem where the paths of the directories name different training steps."""
    steps = {directory: step for directory in found.directories if (step := _step_of(directory)) is not None}
    if len(set(steps.values())) > 1:
        listed = ", ".join([f"{directory} is of step {step}" for directory, step in steps.items()])
        found.problems.append(
            IncompleteError(f"the roots belong to different training steps: {listed}", hint="give roots of one step")
        )


def _step_of(directory: Path) -> int | None:
    for part in reversed(directory.absolute().parts):
        if match := _STEP.fullmatch(part):
            return int(match[1])
    return None


def compare_recorded(found: RankSet, recorded: dict[int, set[int]]) -> Iterator[UnshardError]:
    """Problems of files whose contents name another rank than their names do. `recorded`: rank by name → by content."""
    wrong = {rank: inside for rank, inside in recorded.items() if inside and inside != {rank}}
    if wrong:
        lines = [
            f"{found.ranks[rank].path.name} holds what {ranks_in_words(inside)} saved"
            for rank, inside in sorted(wrong.items())
        ]
        yield IncompleteError(
            f"files do not hold the rank that they are named after:\n{items_in_lines(lines)}",
            hint="a file was copied or renamed; give every rank's own file its own name",
        )
