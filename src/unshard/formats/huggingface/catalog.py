"""The tensors in the weights files of a model, and whether the index and the files tell the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from unshard.checkpoint import Note
from unshard.errors import FormatError, IncompleteError, UnshardError
from unshard.formats.contract import Source
from unshard.formats.huggingface.contents import Contents, read_bin, read_safetensors, some
from unshard.formats.huggingface.index import Index, read_index
from unshard.formats.huggingface.index_check import Discrepancies, compare
from unshard.formats.huggingface.weights import WeightsFiles, check_numbering, find_leftovers, find_weights
from unshard.tensors import SourceFile, Tensor

Result = TypeVar("Result")

_REPAIR = "--repair-index takes the tensors from the files as they are"
_REPAIRED = "the tensors were taken from the files as they are"
_UNRECORDED = (
    "saved by torch's distributed checkpoint, which does not record where tensors end: whole only if one process saved "
    "all of it"
)


@dataclass(slots=True)
class Catalog:
    """What has been found so far; errors are collected.

    places:     all files by name. homes: tensor → the file that it was found in.
    unreadable: weights files that could not be read.
    """

    source: Source
    places: Mapping[str, SourceFile]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    homes: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    problems: list[UnshardError] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    _unrecorded: list[str] = field(default_factory=list)

    def attempt(self, reading: Callable[[], Result]) -> Result | None:
        """The result of `reading`, or None and a problem more."""
        try:
            return reading()
        except UnshardError as error:
            self.problems.append(error)
            return None

    def read(self, weights: WeightsFiles, config: Mapping[str, Any] | None) -> None:
        """Fill in the tensors of the weights files, and all that is wrong with them. `config` belongs to the model."""
        if weights.index:
            files = self._read_indexed(weights, weights.index, config)
        else:
            files = self._read_unindexed(weights)
        leftovers = find_leftovers(self.places, {*files, str(weights.index)}) if not weights.is_adapter else []
        if files and leftovers:
            self.notes.append(Note(f"not read, as transformers does not read them either: {some(leftovers)}"))
        if self._unrecorded:
            known = self.source.named_shapes(config, self.tensors) or {}
            untold = tuple([name for name in self._unrecorded if name not in known])
            self.notes += [Note(_UNRECORDED, untold, level="warning")] if untold else []

    def _read_unindexed(self, weights: WeightsFiles) -> Sequence[str]:
        """Read the files as they are, and return their names."""
        if not weights.usual:
            self.problems += check_numbering(weights.files)
            if len(weights.files) > 1:
                text = f"there is no index: {some(weights.files)} are taken to be one model"
                self.notes.append(Note(text, level="warning"))
        self._read_files(weights.kind, weights.files)
        return weights.files

    def _read_indexed(self, weights: WeightsFiles, name: str, config: Mapping[str, Any] | None) -> Sequence[str]:
        """Read the files that the index names, or, where it is to be repaired, all; return their names."""
        try:
            index = read_index(self._path(name))
        except FormatError as error:
            others = find_weights([place for place in self.places if place != name])
            if not self.source.repair_index or others is None or others.kind != weights.kind:
                self.problems.append(FormatError(error.message, hint=f"fetch the index again; or {_REPAIR}"))
                return ()
            self.notes.append(Note(f"{error.message}; {_REPAIRED}", level="warning"))
            return self._read_unindexed(others)
        files = [file for file in index.files if file in self.places]
        self._read_files(weights.kind, files)
        found = self._compare(index)
        if self.source.repair_index and found.is_lacking:
            others = find_weights([place for place in self.places if place != name])
            more = (
                [file for file in others.files if file not in files] if others and others.kind == weights.kind else []
            )
            self._read_files(weights.kind, more)
            files += more
            found = self._compare(index)
        self._judge(name, index, found, config)
        return files

    def _compare(self, index: Index) -> Discrepancies:
        return compare(index, self.homes, self.places, self.unreadable)

    def _judge(self, name: str, index: Index, found: Discrepancies, config: Mapping[str, Any] | None) -> None:
        """Say where the index is wrong: as problems, or, where it is to be repaired, as notes."""
        sentences = list(found.sentences(name))
        if self.source.repair_index:
            self.notes += [Note(f"{text}; {_REPAIRED}", level="warning") for text in sentences]
            self._miss(name, found, config)
        else:
            for text in sentences:
                cause = "fetch the missing files" if found.missing else "the index and the files are of different saves"
                self.problems.append(IncompleteError(text, hint=f"{cause}; {_REPAIR}"))
        total = sum([tensor.size_in_bytes for tensor in self.tensors.values()])
        if not sentences and not self.problems and index.total_size not in (None, total):
            text = f"{name} tells of {index.total_size:,} bytes of tensors; there are {total:,}"
            self.notes.append(Note(text, level="warning"))

    def _miss(self, name: str, found: Discrepancies, config: Mapping[str, Any] | None) -> None:
        """A problem if tensors that the index names and no file has are parameters of the model.

        Where nothing tells the model's parameters, those in files that are missing are taken for such.
        """
        nowhere = (*found.lost, *found.absent)
        known = self.source.named_shapes(config, [*self.tensors, *nowhere]) if nowhere else None
        needed = found.lost if known is None else [tensor for tensor in nowhere if tensor in known]
        if needed:
            text = f"{name} names {len(needed)} tensors that no file here holds: {some(needed)}"
            self.problems.append(
                IncompleteError(text, hint="fetch the missing files: an index can be repaired, weights not")
            )

    def _path(self, name: str) -> Path:
        return self.source.roots[self.places[name].root] / name

    def _read_files(self, kind: str, files: Sequence[str]) -> None:
        reader = read_safetensors if kind == "safetensors" else read_bin
        for name in files:
            found = self.attempt(partial(reader, self._path(name), self.places[name]))
            if found is None:
                self.unreadable.append(name)
            else:
                self._take(name, found)

    def _take(self, name: str, found: Contents) -> None:
        twice = [tensor for tensor in found.tensors if tensor in self.tensors]
        if twice:
            message = f"{name} holds {len(twice)} tensors that lie in other files too: {some(twice)}"
            other = self.homes[twice[0]]
            hint = f"delete the file that does not belong here, {name} or {other}"
            self.problems.append(IncompleteError(f"{message} (the first in {other})", hint=hint))
        self.skipped |= found.skipped
        self.problems += found.problems
        self._unrecorded += found.unrecorded
        for tensor in found.tensors.values():
            self.tensors.setdefault(tensor.name, tensor)
            self.homes.setdefault(tensor.name, name)
