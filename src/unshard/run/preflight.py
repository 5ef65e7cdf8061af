"""Everything about an output that can be known before its first byte."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from unshard.errors import OutputError, UnshardError, command_line
from unshard.files import OpenFiles
from unshard.plan.moves import Copy, Plan, PlannedFile, pieces_of
from unshard.plan.proof import is_inside
from unshard.run.decoding import existing_place
from unshard.run.occupants import MARKER, Occupants, survey
from unshard.tensors import SourceFile
from unshard.words import bytes_in_words, items_in_words

_LONGEST_NAME = 255
"""Bytes of a file name, on nearly every filesystem."""


def check_output(plan: Plan, output: Path, *, overwrite: bool, scratch: int = 0) -> list[UnshardError]:
    """All reasons why a plan cannot be written to a directory, with `scratch` bytes beside it to decode sources to."""
    problems: list[UnshardError] = list(_check_names([file.path for file in plan.files]))
    place = existing_place(output)
    if not place.is_dir():
        return [*problems, OutputError(f"{place}: is not a directory", hint="choose another output directory")]
    if not os.access(place, os.W_OK | os.X_OK):
        hint = "choose a directory that you may write to"
        return [*problems, OutputError(f"{place}: no permission to write there", hint=hint)]
    occupants = survey(output, [file.path for file in plan.files])
    problems += _check_places(plan, output, occupants)
    problems += _check_occupants(output, occupants, overwrite=overwrite)
    problems += _check_sources(plan, output, occupants)
    problems += _check_room(plan, place, output, occupants, scratch)
    return problems


def _check_names(paths: list[str]) -> Iterator[UnshardError]:
    """Names come from configs and indexes, which may be hostile: none may leave the output directory."""
    seen: set[str] = set()
    for path in paths:
        parts = path.split("/")
        if not is_inside(path):
            yield OutputError(f"`{path}` is no name for a file inside the output directory")
        elif any(len(os.fsencode(part)) > _LONGEST_NAME for part in parts):
            yield OutputError(f"`{path}`: names of files may have {_LONGEST_NAME} bytes")
        elif path in seen or path == MARKER:
            yield OutputError(f"`{path}` would be written twice")
        seen.add(path)


def _check_places(plan: Plan, output: Path, occupants: Occupants) -> Iterator[UnshardError]:
    """A file can only take the place of a file, and no subdirectory may lead elsewhere or withstand changes."""
    for file in plan.files:
        if (output / file.path).is_dir() and not (output / file.path).is_symlink():
            yield OutputError(f"{output / file.path}: is a directory, and a file is to be written there")
    names = [*[file.path for file in plan.files], *occupants.model, *occupants.garbage]
    for parent in sorted({(output / name).parent for name in names} - {output}):
        if parent.is_symlink() or (parent.exists() and not parent.is_dir()):
            yield OutputError(f"{parent}: is not a directory of its own", hint="choose another output directory")
        elif parent.exists() and not os.access(parent, os.W_OK | os.X_OK):
            yield OutputError(f"{parent}: no permission to write there", hint=command_line("chmod", "u+wx", parent))


def _check_occupants(output: Path, occupants: Occupants, *, overwrite: bool) -> Iterator[UnshardError]:
    if occupants.is_empty or overwrite:
        return
    names = [*occupants.model, *occupants.foreign]
    shown = items_in_words(names, 5)
    hint = "choose another directory, or replace the model in this one with --overwrite"
    yield OutputError(f"{output}: is not empty: it holds {shown}", hint=hint)


def _check_sources(plan: Plan, output: Path, occupants: Occupants) -> Iterator[UnshardError]:
    """No source may be among the files that are replaced or removed; nor what only the catalog was read from."""
    roots = [root for root in plan.roots.values() if output.exists() and root.is_dir() and root.samefile(output)]
    if roots and occupants.model:
        message = f"{output}: is where this merge reads from, and --overwrite would replace files of the checkpoint"
        yield OutputError(message, hint="choose an output directory outside the checkpoint")
        return
    doomed = {*occupants.garbage, *occupants.model, *[file.path for file in plan.files]}
    lost = {name: (output / name).resolve() for name in doomed if (output / name).exists()}
    files = OpenFiles(plan.roots)
    sources = {files.path(source).resolve() for source in list_sources(plan)} if lost else set()
    for name, path in sorted(lost.items()):
        if path in sources:
            message = f"{output / name}: is read from by this merge, and would be replaced by it"
            yield OutputError(message, hint="choose an output directory outside the checkpoint")


def list_sources(plan: Plan) -> set[SourceFile]:
    """Every file that a plan reads."""
    found: set[SourceFile] = set()
    for move in [move for file in plan.files for move in file.moves]:
        if isinstance(move, Copy):
            found.add(move.file)
        found.update([piece.extent.file for piece in pieces_of(move)])
    return found


def _check_room(plan: Plan, place: Path, output: Path, occupants: Occupants, scratch: int) -> Iterator[UnshardError]:
    """New files are written beside the old ones, which go only when the new ones are complete."""
    disk = os.statvfs(place)
    if disk.f_blocks == 0:
        return
    freed = sum([(output / name).lstat().st_blocks * 512 for name in occupants.garbage])
    free = disk.f_bavail * disk.f_frsize + freed
    needed = sum([_round_up(file, disk.f_frsize) for file in plan.files]) + scratch
    if needed <= free:
        return
    old = sum([(output / name).lstat().st_blocks * 512 for name in occupants.model])
    hint = "free some space, or choose a directory on another disk"
    if free + old >= needed:
        hint += f"; removing the old model in {output} first would be enough"
    decoding = f" ({bytes_in_words(scratch)} of them for a while, to decode compressed pieces)" if scratch else ""
    message = f"{output}: {bytes_in_words(needed)} are needed{decoding}, {bytes_in_words(free)} are free on that disk"
    yield OutputError(message, hint=hint)


def _round_up(file: PlannedFile, block: int) -> int:
    return -(-file.size // block) * block
