"""The files of a DCP directory, which may be spread over the local disks of several nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath

from unshard.errors import FormatError, IncompleteError, NotACheckpointError, UnshardError, command_line
from unshard.formats.dcp.file_names import METADATA, RANK_METADATA, UNFINISHED, is_dcp_file, rank_of
from unshard.formats.dcp.metadata import Metadata, Recorded, TensorEntry, read_metadata
from unshard.tensors import SourceFile
from unshard.words import names_in_words, ranks_in_words, shorten

_EARLIER = "take the checkpoint of an earlier step"
_INTERRUPTED = f"the save was interrupted before its end: {_EARLIER}"


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

    def read_metadata(self) -> list[Recorded]:
        """What the one `.metadata` says, or those of all ranks.

        Raises NotACheckpointError and IncompleteError where there are none, FormatError where one cannot be read.
        """
        whole = self.find(METADATA)
        if whole is not None:
            return [read_metadata(*whole)]
        names = self._names()
        ranks = sorted([(int(match[1]), name) for name in names if (match := RANK_METADATA.fullmatch(name))])
        if not ranks:
            raise self._no_metadata(names)
        return [read_metadata(*place) for _, name in ranks if (place := self.find(name)) is not None]

    def check(self) -> Iterator[UnshardError]:
        """Problems that show in the names of the files: saves that were cut short, files that are there twice."""
        names = self._names()
        described = {int(match[1]) for name in names if (match := RANK_METADATA.fullmatch(name))}
        unfinished = sorted([name for name in names if UNFINISHED.fullmatch(name)])
        missing: set[int] = set()
        if METADATA not in names:
            missing = {rank for name in names if (rank := rank_of(name)) is not None} | set(range(max(described)))
            missing -= described
        elif described:
            text = f"{self.folders[0].path}: there are metadata of ranks beside {METADATA}: two saves were written here"
            yield IncompleteError(f"{text}, and files may be of either", hint=_EARLIER)
        if missing:
            text = f"{self.folders[0].path}: every rank has metadata of its own; those of {ranks_in_words(missing)}"
            yield IncompleteError(f"{text} are missing", hint=_INTERRUPTED)
        elif unfinished:
            text = f"{self.folders[0].path}: there is {unfinished[0]} beside the metadata: a later save was"
            yield IncompleteError(f"{text} interrupted, and files may be of either", hint=_EARLIER)
        for name in sorted(filter(is_dcp_file, names)):
            places = [folder.path / name for folder in self.folders if (folder.path / name).exists()]
            if len(places) > 1 and not all(place.samefile(places[0]) for place in places):
                found = " and ".join([str(place) for place in places])
                yield IncompleteError(f"{name} is there twice: {found}", hint="leave out the root that does not belong")

    def _names(self) -> set[str]:
        return {name for folder in self.folders for name in _names_in(folder.path)}

    def _no_metadata(self, names: Iterable[str]) -> UnshardError:
        place = self.folders[0].path
        unfinished = [name for name in names if UNFINISHED.fullmatch(name)]
        if unfinished:
            return IncompleteError(f"{place}: there is {unfinished[0]}, but no {METADATA}", hint=_INTERRUPTED)
        if any(rank_of(name) is not None for name in names):
            hint = f"{_INTERRUPTED}; if it was only not copied, fetch the hidden file {METADATA} too"
            return IncompleteError(f"{place}: there are .distcp files, but no {METADATA}", hint=hint)
        return NotACheckpointError(
            f"{place}: no directory of torch.distributed.checkpoint", hint=command_line("ls", "-a", place)
        )


def _names_in(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError as error:
        raise FormatError(f"{folder}: cannot be read: {error.strerror}") from error


@dataclass(slots=True)
class Merged:
    """The metadata of several ranks as one: their pieces side by side. Of objects, the lowest rank's are taken."""

    metadata: Metadata = field(default_factory=Metadata)
    problems: list[UnshardError] = field(default_factory=list)

    def add(self, file: SourceFile, part: Metadata) -> None:
        """Take those of one more rank, which `file` holds."""
        whole = self.metadata
        self._add_tensors(file, part.tensors)
        whole.skipped |= part.skipped
        whole.objects = {**part.objects, **whole.objects}
        whole.paths = {**part.paths, **whole.paths}
        whole.extra = {**part.extra, **whole.extra}
        whole.files |= part.files

    def _add_tensors(self, file: SourceFile, tensors: Mapping[str, TensorEntry]) -> None:
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
