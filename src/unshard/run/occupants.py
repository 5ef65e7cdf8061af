"""What lies in an output directory before a run: a killed run's leftovers, an old model, something foreign."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from unshard.model_files import ADAPTER_DIRECTORY, LOADABLE_PATTERNS, TEMPLATE_DIRECTORY, matches

MARKER = ".unshard-in-progress"
"""The file that says that the directory is not whole. It is made before and removed after everything else."""

_LARGEST_MARKER = 100 << 20

_TEMPORARY = ".unshard-*.tmp"

WITHDRAWN = ".failed-verification"
"""What is added to the name of a file that was published and then found to be wrong."""

REPLACEABLE = (f"*{WITHDRAWN}", *LOADABLE_PATTERNS)
"""Files that a loader may take for a part of a model: what `--overwrite` replaces. All else stays where it is."""

_MODEL_DIRECTORIES = (ADAPTER_DIRECTORY, TEMPLATE_DIRECTORY)
"""Subdirectories that belong to a model."""


@dataclass(frozen=True, slots=True)
class Marker:
    """What an unfinished run said of itself: which files here, where they exist, are not a whole model.

    That is all the run was going to write; where it replaces a model, nothing until the old one begins to go, and then
    also what was left of that.
    """

    files: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """As JSON, with the process for those who wonder."""
        about = {"pid": os.getpid(), "host": os.uname().nodename, "files": self.files}
        return json.dumps(about, indent=1).encode() + b"\n"

    @staticmethod
    def decode(data: bytes) -> Marker:
        """A marker that was cut short, or is none, lists no files."""
        try:
            about = json.loads(data)
            return Marker(tuple([str(name) for name in about["files"]]))
        except (ValueError, LookupError, TypeError):
            return Marker()


@dataclass(frozen=True, slots=True)
class Occupants:
    """The files of an output directory, relative with forward slashes, by what becomes of them.

    garbage: what a killed run left behind: removed before the first byte is written.
    model:   files that `--overwrite` replaces: removed once the new ones are complete.
    foreign: everything else: never touched.
    """

    garbage: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing that anybody could miss."""
        return not (self.model or self.foreign)


def survey(output: Path, planned: Sequence[str]) -> Occupants:
    """Sort what lies in a directory, which need not exist, for a run that will write the `planned` files there."""
    marker = Marker.decode(_read_marker(output / MARKER))
    found: dict[str, list[str]] = {"garbage": [], "model": [], "foreign": []}
    for name in _list_files(output, {path.split("/")[0] for path in planned if "/" in path}):
        if name == MARKER:
            continue
        if fnmatchcase(name, _TEMPORARY) or name in marker.files:
            kind = "garbage"
        elif name in planned or matches(name, REPLACEABLE):
            kind = "model"
        else:
            kind = "foreign"
        found[kind].append(name)
    return Occupants(**{kind: tuple(sorted(names)) for kind, names in found.items()})


def temporary_name(token: str, number: int) -> str:
    """The name under which a run writes its file number `number`; short, whatever the final name's length."""
    return f".unshard-{token}-{number}.tmp"


def _list_files(output: Path, planned_directories: set[str]) -> Iterator[str]:
    """Files at the top and in the directories of a model; other directories by their names alone, with a slash."""
    if not output.is_dir():
        return
    for entry in os.scandir(output):
        if not entry.is_dir(follow_symlinks=False):
            yield entry.name
        elif entry.name in planned_directories or matches(entry.name, _MODEL_DIRECTORIES):
            for path in Path(entry.path).rglob("*"):
                if path.is_symlink() or not path.is_dir():
                    yield path.relative_to(output).as_posix()
        else:
            yield entry.name + "/"


def _read_marker(path: Path) -> bytes:
    """The marker's bytes; none where there is none, or what bears its name cannot be ours."""
    try:
        status = path.lstat()
        return path.read_bytes() if stat.S_ISREG(status.st_mode) and status.st_size <= _LARGEST_MARKER else b""
    except OSError:
        return b""
