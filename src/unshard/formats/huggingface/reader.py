"""A Hugging Face model directory, a PEFT adapter directory, or a lone safetensors file, as a catalog."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from unshard.checkpoint import Asset, Checkpoint, Note
from unshard.errors import FormatError, IncompleteError, NotACheckpointError, UnshardError, command_line
from unshard.formats.contract import Source
from unshard.formats.huggingface.assets import find_assets, list_directory, read_config
from unshard.formats.huggingface.index import Index, read_index
from unshard.formats.huggingface.weights import Weights, check_numbering, find_leftovers, find_weights
from unshard.formats.safetensors_file import read_header
from unshard.model_files import ADAPTER_CONFIG
from unshard.tensors import SourceFile, Tensor
from unshard.words import items_in_words, one_line, shorten

_SUFFIX = ".safetensors"
Result = TypeVar("Result")

_DCP_METADATA = "DCP_SHARDING_INFO"
"""Written by torch's HuggingFaceStorageWriter where a file holds pieces of tensors (torch/distributed/checkpoint)."""


class HuggingFace:
    """The format of `save_pretrained`. See `formats.contract.Format`."""

    name = "huggingface"
    backends: Sequence[str] = ("huggingface",)

    def detect(self, path: Path) -> str | None:
        if path.is_file():
            return "a safetensors file" if path.name.endswith(_SUFFIX) else None
        weights = find_weights(_list_files([path])) if path.is_dir() else None
        return str(weights) if weights else None

    def read(self, source: Source) -> Checkpoint:
        if source.path.is_file():
            weights: Weights | None = Weights("safetensors", (source.path.name,), usual=False)
            catalog = _Catalog(source.roots, {source.path.name: SourceFile("source", source.path.name)})
            title = "a safetensors file"
        else:
            files = _list_files(source.roots.values())
            roots = list(source.roots)
            catalog = _Catalog(source.roots, {name: SourceFile(roots[place], name) for name, place in files.items()})
            weights = find_weights(files)
            title = str(weights)
        if weights is None:
            message = f"{source.path}: no weights of a Hugging Face model"
            raise NotACheckpointError(message, hint=command_line("ls", source.path))
        catalog.read(weights)
        config, assets = catalog.side_files(source.path) if source.path.is_dir() else (None, ())
        return Checkpoint(
            format=self.name,
            title=title[:1].upper() + title[1:],
            roots=source.roots,
            tensors=catalog.tensors,
            config=config,
            assets=assets,
            adapter=catalog.attempt(lambda: _read_adapter_config(source.path)) if weights.is_adapter else None,
            skipped=catalog.skipped,
            notes=tuple(catalog.notes),
            problems=tuple(catalog.problems),
        )


def _list_files(directories: Iterable[Path]) -> dict[str, int]:
    """Names of the files in directories → the number of the first directory that has it. Links to nothing count."""
    found: dict[str, int] = {}
    for number, directory in enumerate(directories):
        for entry in list_directory(directory):
            if not entry.is_dir():
                found.setdefault(entry.name, number)
    return found


def _read_adapter_config(directory: Path) -> dict[str, Any] | None:
    path = directory / ADAPTER_CONFIG
    return read_config(path) if path.exists() else None


@dataclass(slots=True)
class _Catalog:
    """What has been found so far; errors are collected. `places` has all files by name."""

    roots: Mapping[str, Path]
    places: Mapping[str, SourceFile]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    homes: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    problems: list[UnshardError] = field(default_factory=list)

    def attempt(self, reading: Callable[[], Result]) -> Result | None:
        """The result of `reading`, or None and a problem more."""
        try:
            return reading()
        except UnshardError as error:
            self.problems.append(error)
            return None

    def side_files(self, directory: Path) -> tuple[dict[str, Any] | None, tuple[Asset, ...]]:
        """The parsed config and the assets."""
        return self.attempt(lambda: find_assets(directory, "source")) or (None, ())

    def read(self, weights: Weights) -> None:
        """Fill in the tensors of the weights files, and all that is wrong with them."""
        index: Index | None = None
        files: Sequence[str] = weights.files
        if weights.index:
            index = self.attempt(lambda: read_index(self._path(str(weights.index))))
            if index is None:
                return
            files = self._present(index.files, weights.index)
        elif not weights.usual:
            self.problems += check_numbering(files)
            if len(files) > 1:
                text = f"there is no index: {_some(files)} are taken to be one model"
                self.notes.append(Note(text, level="warning"))
        leftovers = find_leftovers(self.places, {*files, str(weights.index)}) if not weights.is_adapter else []
        if leftovers:
            self.notes.append(Note(f"not read, as transformers does not read them either: {_some(leftovers)}"))
        reader = _read_safetensors if weights.kind == "safetensors" else _read_bin
        for name in files:
            found = self.attempt(partial(reader, self._path(name), self.places[name]))
            if found is not None:
                self._take(name, found)
        if index:
            self._compare(index, set(files), str(weights.index))

    def _path(self, name: str) -> Path:
        return self.roots[self.places[name].root] / name

    def _present(self, files: Sequence[str], index: str) -> list[str]:
        missing = [name for name in files if name not in self.places]
        if missing:
            message = f"{index} names {len(missing)} of {len(files)} files that are not there: {_some(missing)}"
            self.problems.append(IncompleteError(message, hint="fetch the missing files"))
        return [name for name in files if name in self.places]

    def _take(self, name: str, found: _Found) -> None:
        twice = [tensor for tensor in found.tensors if tensor in self.tensors]
        if twice:
            message = f"{name} holds {len(twice)} tensors that lie in other files too: {_some(twice)}"
            other = self.homes[twice[0]]
            hint = f"delete the file that does not belong here, {name} or {other}"
            self.problems.append(IncompleteError(f"{message} (the first in {other})", hint=hint))
        self.skipped |= found.skipped
        self.problems += found.problems
        for tensor in found.tensors.values():
            self.tensors.setdefault(tensor.name, tensor)
            self.homes.setdefault(tensor.name, name)

    def _compare(self, index: Index, read: set[str], name: str) -> None:
        """What the index says, against what the files hold that could be read."""
        expected = {tensor: file for tensor, file in index.weight_map.items() if file in read}
        absent = [tensor for tensor in expected if tensor not in self.tensors]
        elsewhere = [tensor for tensor in expected if self.homes.get(tensor, expected[tensor]) != expected[tensor]]
        unlisted = [tensor for tensor in self.tensors if tensor not in index.weight_map]
        for tensors, words in (
            (absent, "names {} tensors that are in none of its files"),
            (elsewhere, "names the wrong file for {} tensors"),
            (unlisted, "does not list {} tensors that are in its files"),
        ):
            if tensors:
                message = f"{name} {words.format(len(tensors))}: {_some(tensors)}"
                self.problems.append(IncompleteError(message, hint="the index and the files are of different saves"))
        total = sum(tensor.size_in_bytes for tensor in self.tensors.values())
        if not self.problems and index.total_size not in (None, total):
            text = f"{name} tells of {index.total_size:,} bytes of tensors; there are {total:,}"
            self.notes.append(Note(text, level="warning"))


@dataclass(frozen=True, slots=True)
class _Found:
    """The contents of one weights file."""

    tensors: Mapping[str, Tensor]
    skipped: Mapping[str, str] = field(default_factory=dict)
    problems: Sequence[UnshardError] = ()


def _read_safetensors(path: Path, file: SourceFile) -> _Found:
    header = read_header(path, file)
    if _DCP_METADATA in header.metadata:
        raise FormatError(f"{path}: holds pieces of tensors, written by torch's distributed checkpoint, not a model")
    return _Found(header.tensors)


def _read_bin(path: Path, file: SourceFile) -> _Found:
    from unshard.formats.state_dict import find_state_dict, is_tensor, read_whole, what_it_is
    from unshard.formats.torch_file import StoredTensor, UnsupportedTensor, read_torch_file

    state, skipped = find_state_dict(read_torch_file(path, file).root, str(path))
    tensors: dict[str, Tensor] = {}
    problems: list[UnshardError] = []
    for name, entry in state.items():
        if isinstance(entry, StoredTensor):
            try:
                tensors[name] = Tensor(name, entry.dtype, entry.shape, read_whole(entry, None))
            except FormatError as error:
                problems.append(error)
        elif isinstance(entry, UnsupportedTensor):
            problems.append(FormatError(f"{path}: {_shown(name)}: this tensor {entry.reason}"))
        elif is_tensor(entry):
            problems.append(FormatError(f"{path}: {_shown(name)} is a piece of a distributed tensor, not a whole one"))
        else:
            skipped[name] = what_it_is(entry)
    return _Found(tensors, skipped, problems)


def _some(names: Sequence[str]) -> str:
    """The first few of many names."""
    return items_in_words([_shown(name) for name in names], 5)


def _shown(name: str) -> str:
    """A name that strangers chose, fit to be printed."""
    return one_line(shorten(name, 200))
