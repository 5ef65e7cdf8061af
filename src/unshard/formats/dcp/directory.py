"""The files of a DCP directory, which may be spread over the local disks of several nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath

from unshard.errors import FormatError, IncompleteError, NotACheckpointError, UnshardError, command_line
from unshard.formats.dcp.metadata import Metadata, TensorEntry, read_metadata
from unshard.tensors import SourceFile
from unshard.words import names_in_words, ranks_in_words, shorten

METADATA = ".metadata"
_RANK_METADATA = re.compile(r"__(\d{1,6})\.metadata")
_UNFINISHED = re.compile(r"(__\d{1,9})?\.metadata\.tmp")
_DATA = re.compile(r"__(\d{1,9})_\d+\.distcp")
_INTERRUPTED = "the save was interrupted before its end: take the checkpoint of an earlier step"


@dataclass(frozen=True, slots=True)
class Folder:
    """A directory `path`, whose files extents call `relative/…` under `root`."""

    path: Path
    root: str
    relative: str = ""

    def file(self, name: str) -> SourceFile:
        return SourceFile(self.root, f"{self.relative}/{name}" if self.relative else name)


@dataclass(frozen=True, slots=True)
class Directory:
    """A checkpoint's folders, in the order in which a file is looked for in them."""

    folders: Sequence[Folder]

    def find(self, name: str) -> tuple[Path, SourceFile] | None:
        """The place of a file that the metadata name, and what extents call it; None where it is missing.

        Raises FormatError for names that lead out of the directory.
        """
        if not name or "\0" in name or PureWindowsPath(name).anchor or ".." in re.split(r"[/\\]", name):
            raise FormatError(
                f"{self.folders[0].file(METADATA)}: names a file outside of the directory: {shorten(name, 200)!r}"
            )
        try:
            there = [folder for folder in self.folders if (folder.path / name).exists()]
        except OSError as error:
            raise FormatError(f"{shorten(name, 200)}: cannot be looked for: {error.strerror}") from error
        return (there[0].path / name, there[0].file(name)) if there else None

    def usual(self, name: str) -> tuple[Path, SourceFile]:
        """The same for a file that is missing: where it should be."""
        return self.folders[0].path / name, self.folders[0].file(name)

    def read_metadata(self, wanted: Callable[[str], bool]) -> tuple[Metadata, list[UnshardError]]:
        """What the one `.metadata` says, or those of all ranks together, and what is wrong with them.

        Raises NotACheckpointError and IncompleteError where there are none, FormatError where one cannot be read.
        """
        whole = self.find(METADATA)
        if whole is not None:
            return read_metadata(*whole, wanted), []
        names = {name for folder in self.folders for name in _names_in(folder.path)}
        ranks = {int(match[1]): match[0] for name in names if (match := _RANK_METADATA.fullmatch(name))}
        if not ranks:
            raise self._no_metadata(names)
        merged = _Merged()
        for _, name in sorted(ranks.items()):
            place = self.find(name)
            if place is not None:
                merged.add(name, read_metadata(*place, wanted))
        missing = {rank for name in names if (rank := rank_of(name)) is not None} | set(range(max(ranks)))
        missing -= ranks.keys()
        if missing:
            text = f"{self.folders[0].path}: every rank has metadata of its own; those of {ranks_in_words(missing)}"
            merged.problems.append(IncompleteError(f"{text} are missing", hint=_INTERRUPTED))
        return merged.metadata, merged.problems

    def _no_metadata(self, names: Iterable[str]) -> UnshardError:
        place = self.folders[0].path
        unfinished = [name for name in names if _UNFINISHED.fullmatch(name)]
        if unfinished:
            return IncompleteError(f"{place}: there is {unfinished[0]}, but no {METADATA}", hint=_INTERRUPTED)
        if any(rank_of(name) is not None for name in names):
            hint = f"{_INTERRUPTED}; if it was only not copied, fetch the hidden file {METADATA} too"
            return IncompleteError(f"{place}: there are .distcp files, but no {METADATA}", hint=hint)
        return NotACheckpointError(
            f"{place}: no directory of torch.distributed.checkpoint", hint=command_line("ls", "-a", place)
        )


def rank_of(name: str) -> int | None:
    """The rank that wrote the file `__{rank}_{n}.distcp`; None for files of other names."""
    match = _DATA.fullmatch(name.rpartition("/")[2])
    return int(match[1]) if match else None


def _names_in(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError as error:
        raise FormatError(f"{folder}: cannot be read: {error.strerror}") from error


@dataclass(slots=True)
class _Merged:
    """The metadata of several ranks as one: their pieces side by side. Of objects, the lowest rank's are taken."""

    metadata: Metadata = field(default_factory=Metadata)
    problems: list[UnshardError] = field(default_factory=list)

    def add(self, name: str, part: Metadata) -> None:
        whole = self.metadata
        self._add_tensors(name, part.tensors)
        whole.skipped |= part.skipped
        whole.objects = {**part.objects, **whole.objects}
        whole.paths = {**part.paths, **whole.paths}
        whole.extra = {**part.extra, **whole.extra}
        whole.files |= part.files

    def _add_tensors(self, file: str, tensors: Mapping[str, TensorEntry]) -> None:
        differing = []
        for name, entry in tensors.items():
            known = self.metadata.tensors.get(name)
            if known is None:
                self.metadata.tensors[name] = entry
            elif (known.dtype, known.shape) != (entry.dtype, entry.shape):
                differing.append(name)
            else:
                known.pieces.extend(entry.pieces)
        if differing:
            text = f"{file}: other shapes or types than the ranks before it: {names_in_words(differing)}"
            self.problems.append(IncompleteError(text, hint="are all files of one checkpoint?"))
