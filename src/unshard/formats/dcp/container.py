"""Reads a directory of torch.distributed.checkpoint into tensors and items."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from unshard.checkpoint import Note
from unshard.dtypes import DType
from unshard.errors import FormatError, IncompleteError, UnshardError
from unshard.formats.dcp.metadata import Metadata, Place, read_metadata
from unshard.formats.dcp.objects import Item
from unshard.formats.dcp.payloads import PayloadFinder
from unshard.formats.state_dict import read_chunk
from unshard.formats.torch_file.slices import open_slice
from unshard.tensors import Box, Chunk, SourceFile, Tensor
from unshard.words import items_in_words

METADATA = ".metadata"
_RANK = re.compile(r"__(\d{1,9})_\d+\.distcp")


@dataclass(frozen=True, slots=True)
class Container:
    """What a DCP directory holds, under its own keys.

    tensors:  key → tensor; chunks have absolute offsets, and the rank that the name `__{rank}_{n}.distcp` tells.
    items:    key → an entry that is no tensor, read by `read_item`.
    paths:    flattened key → the path of keys and list positions in the nested state dict; empty where not recorded.
    skipped:  tensors that nobody wanted, with the reason; their files were not opened.
    extra:    attributes of the metadata object that torch itself does not have (Megatron-Core's `mcore_data`).
    """

    tensors: Mapping[str, Tensor]
    items: Mapping[str, Item]
    paths: Mapping[str, tuple[str | int, ...]]
    skipped: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, object] = field(default_factory=dict)
    problems: tuple[UnshardError, ...] = ()
    notes: tuple[Note, ...] = ()


def read_container(
    directory: Path, root: str, relative: str = "", wanted: Callable[[str], bool] = lambda _name: True
) -> Container:
    """The catalog of the DCP directory `directory`, whose extents name files `relative/…` under `root`.

    `wanted` says of a tensor's key whether its payload must be found. FormatError where the metadata cannot be read.
    """
    prefix = f"{relative}/" if relative else ""
    metadata = read_metadata(directory / METADATA, SourceFile(root, prefix + METADATA))
    return _Reading(directory, root, prefix, metadata).run(wanted)


@dataclass(slots=True)
class _Reading:
    directory: Path
    root: str
    prefix: str
    metadata: Metadata
    problems: list[UnshardError] = field(default_factory=list)

    def run(self, wanted: Callable[[str], bool]) -> Container:
        names = [name for name in self.metadata.tensors if wanted(name)]
        chunks = self._read_chunks(names)
        tensors = {}
        for name in names:
            entry = self.metadata.tensors[name]
            if isinstance(entry.dtype, DType):
                tensors[name] = Tensor(name, entry.dtype, entry.shape, tuple(chunks[name]))
            else:
                self.problems.append(FormatError(f"`{name}` is of {entry.dtype}, which safetensors cannot hold"))
        return Container(
            tensors,
            self._items(),
            self.metadata.paths,
            {name: "was not asked for" for name in self.metadata.tensors if name not in tensors},
            self.metadata.extra,
            tuple(self.problems),
        )

    def _items(self) -> dict[str, Item]:
        items = {}
        for name in self.metadata.objects:
            place = self.metadata.places.get((name, None))
            if place is None:
                self.problems.append(IncompleteError(f"the metadata do not say where `{name}` was written"))
                continue
            file = self._file(place.path)
            items[name] = Item(file, self.directory / place.path, place.offset, place.length, place.transforms)
        return items

    def _file(self, path: str) -> SourceFile:
        if path.startswith("/") or ".." in path.split("/"):
            raise FormatError(f"{self.prefix}{METADATA}: names a file outside of the directory: {path}")
        return SourceFile(self.root, self.prefix + path)

    def _read_chunks(self, names: list[str]) -> dict[str, list[Chunk]]:
        chunks: dict[str, list[Chunk]] = {name: [] for name in names}
        by_file: dict[str, list[tuple[Place, str, Box]]] = {}
        lost = []
        for name in names:
            for box in self.metadata.tensors[name].boxes:
                if 0 in box.sizes:
                    continue
                place = self.metadata.places.get((name, box.offsets))
                if place is None:
                    lost.append(f"{name} {box}")
                elif place.transforms:
                    self.problems.append(FormatError(f"`{name}` was written through {', '.join(place.transforms)}"))
                else:
                    by_file.setdefault(place.path, []).append((place, name, box))
        if lost:
            self.problems.append(
                IncompleteError(f"the metadata do not say where chunks were written: {items_in_words(lost)}")
            )
        finder = PayloadFinder()
        for path, entries in sorted(by_file.items()):
            file = self._file(path)
            if not (self.directory / path).exists():
                count = len({name for _, name, _ in entries})
                self.problems.append(IncompleteError(f"{file} is missing: {count} tensors have holes"))
                continue
            rank = int(match[1]) if (match := _RANK.fullmatch(path)) else None
            with open_slice(self.directory / path) as source:
                for place, name, box in sorted(entries, key=lambda entry: entry[0].offset):
                    try:
                        tensor = finder.find(source, self.directory / path, file, place)
                        if tensor.shape != box.sizes:
                            raise FormatError(f"{file}: `{name}` {box} has the shape {list(tensor.shape)}")
                        chunks[name].append(read_chunk(tensor, box, Box.whole(box.sizes), rank))
                    except FormatError as error:
                        self.problems.append(error)
        return chunks
