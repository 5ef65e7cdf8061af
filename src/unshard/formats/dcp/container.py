"""A directory of torch.distributed.checkpoint, as tensors and items under its own keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unshard.checkpoint import Note
from unshard.errors import FormatError, IncompleteError, UnshardError
from unshard.formats.dcp.directory import Directory, Folder, Merged
from unshard.formats.dcp.metadata import Metadata, Outline, Recorded, Steps
from unshard.formats.dcp.objects import Item
from unshard.formats.dcp.reading import TensorReader
from unshard.tensors import Tensor
from unshard.words import names_in_words


@dataclass(frozen=True, slots=True)
class Container:
    """What a DCP directory holds.

    tensors:  key → tensor; chunks have absolute offsets, and the rank that the name `__{rank}_{n}.distcp` tells.
    items:    key → an entry that is no tensor, read by `read_item`.
    paths:    flattened key → its path of keys and list positions in the nested state dict; empty where not recorded.
    skipped:  tensors that nobody asked for, with the bytes of each. Their items were not opened.
    files:    the names of all files in which something was written.
    extra:    attributes of the metadata that torch itself does not have (Megatron-Core's `mcore_data`), as records.
    problems: what forbids a merge; that chunks leave holes or overlap is not among it, unless files are missing.
    """

    tensors: Mapping[str, Tensor]
    items: Mapping[str, Item]
    paths: Mapping[str, Steps]
    skipped: Mapping[str, int] = field(default_factory=dict)
    files: Collection[str] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[UnshardError, ...] = ()
    notes: tuple[Note, ...] = ()


@dataclass(slots=True)
class OpenContainer:
    """A DCP directory whose metadata were read, and none of its data. What it holds can be read once."""

    files: Directory
    outline: Outline
    _recorded: list[Recorded]

    def read(self, wanted: Callable[[str], bool]) -> Container:
        """The catalog.

        wanted: whether a tensor's payload must be found, by its key: optimizer states need not be opened.

        Raises FormatError where the metadata are damaged.
        """
        merged = Merged()
        while self._recorded:  # so that what was decoded need not be kept twice
            recorded = self._recorded.pop(0)
            merged.add(recorded.file, recorded.decode(wanted))
        metadata = merged.metadata
        reader = TensorReader(self.files, metadata)
        tensors = reader.read()
        items, item_problems = _items(self.files, metadata)
        return Container(
            tensors,
            items,
            metadata.paths,
            metadata.skipped,
            metadata.files,
            metadata.extra,
            (*self.files.check(), *merged.problems, *reader.faults.problems(), *item_problems),
            tuple(reader.notes),
        )


def open_container(folders: Sequence[Folder]) -> OpenContainer:
    """The DCP directory that is the first of these folders; files of the same checkpoint may lie in the others.

    Raises FormatError where the metadata cannot be read, IncompleteError where they are missing beside data or only
    begun, NotACheckpointError where there is neither.
    """
    files = Directory(folders)
    recorded = files.read_metadata()
    outlines = [part.outline for part in recorded]
    outline = outlines[0]
    if len(outlines) > 1:
        outline = Outline(
            {name: size for part in outlines for name, size in part.tensors.items()},
            {name: None for part in outlines for name in part.objects}.keys(),
            {name: steps for part in outlines for name, steps in part.paths.items()},
        )
    return OpenContainer(files, outline, recorded)


def read_container(
    directory: Path,
    root: str,
    relative: str = "",
    wanted: Callable[[str], bool] = lambda _key: True,
    also: Sequence[Folder] = (),
) -> Container:
    """The catalog of the DCP directory `directory`, whose extents call its files `relative/…` under `root`.

    See `open_container` and `OpenContainer.read`.
    """
    return open_container((Folder(directory, root, relative), *also)).read(wanted)


def _items(files: Directory, metadata: Metadata) -> tuple[dict[str, Item], list[UnshardError]]:
    """The entries that are no tensors. One whose file is missing gets its usual place, and fails when it is read."""
    items: dict[str, Item] = {}
    problems: list[UnshardError] = []
    unplaced = []
    for name, place in metadata.objects.items():
        if place is None:
            unplaced.append(name)
            continue
        try:
            path, file = files.find(place.path) or files.usual(place.path)
        except FormatError as error:
            problems.append(error)
            continue
        items[name] = Item(file, path, place.offset, place.length, place.transforms)
    if unplaced:
        text = f"the metadata do not say where entries were written: {names_in_words(unplaced)}"
        problems.append(IncompleteError(text, hint="copy the metadata again, or take an earlier checkpoint"))
    return items, problems
