"""What `.metadata` says: which entries there are, of which pieces they are made, and where each piece was written.

The file is one pickle (torch `distributed/checkpoint/metadata.py` and `filesystem.py`): a `Metadata` with
`state_dict_metadata` (name → `TensorStorageMetadata` or `BytesStorageMetadata`), `storage_data` (`MetadataIndex` →
`_StorageInfo`) and `planner_data` (name → nested path). Classes are told apart by their last name: their modules have
moved between releases, and Megatron-Core has had a subclass of the root.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

from unshard.dtypes import DType
from unshard.errors import FormatError
from unshard.formats.torch_file.builder import RecordBuilder
from unshard.formats.torch_file.limits import DEFAULT_LIMITS, MIB, Limits
from unshard.formats.torch_file.machine import Budget
from unshard.formats.torch_file.records import Global, Opaque
from unshard.formats.torch_file.slices import open_slice
from unshard.formats.torch_file.storages import Storages
from unshard.formats.torch_file.unpickler import unpickle
from unshard.tensors import Box, SourceFile

MOST_BYTES = 256 * MIB
"""Of one metadata file. A piece takes 150 to 300: a model of 60,000 pieces and its optimizer has about 50 MB."""

BYTES_PER_PIECE = 16
"""Less than any piece takes in the pickle: nobody can make a short list of pieces work for many tensors."""

LARGEST = (1 << 63) - 1
MOST_STEPS = 64
"""Of a path in the nested state dict, or of what was done to an item's bytes."""
TORCH_KEYS = frozenset({"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"})
PLANS = "all_local_plans"
"""What Megatron-Core adds for its next save: once more what the metadata say, by rank."""

Steps: TypeAlias = tuple[str | int, ...]
Index: TypeAlias = tuple[str, tuple[int, ...] | None]
"""A name, and the offsets of a piece; None for entries that are no tensors."""


@dataclass(frozen=True, slots=True)
class Place:
    """`length` bytes of the file `path`, which is relative to the directory, from byte `offset` on.

    `transforms` are the descriptors (`stream.zstd/1`) of what the writer did to the bytes.
    """

    path: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """A chunk of a tensor as it was recorded. `place` is None where the metadata do not say where it was written."""

    box: Box
    place: Place | None


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor as it was recorded. `dtype` is torch's name of it where it is none of ours."""

    dtype: DType | str
    shape: tuple[int, ...]
    pieces: list[Piece]


@dataclass(frozen=True, slots=True)
class Outline:
    """Which entries there are, before the pieces of any are looked at.

    tensors: name → bytes of the whole tensor; 0 where its type or shape is none of ours.
    objects: names of the entries that are no tensors.
    paths:   name → its path in the nested state dict; empty where none was recorded.
    """

    tensors: Mapping[str, int]
    objects: Collection[str] = ()
    paths: Mapping[str, Steps] = field(default_factory=dict)


@dataclass(slots=True)
class Metadata:
    """The content of one metadata file, or of those of all ranks.

    tensors:  the tensors that were asked for.
    skipped:  the others, with the bytes of each.
    objects:  entries that are no tensors; None where the metadata do not say where one was written.
    paths:    name → its path in the nested state dict.
    extra:    attributes that torch does not know.
    files:    the names of all files in which something was written.
    """

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    objects: dict[str, Place | None] = field(default_factory=dict)
    paths: dict[str, Steps] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)


class NoStorages:
    """The location of storages in a pickle that has none."""

    def find(self, key: str, nbytes: int, numel: int) -> int:
        raise FormatError("the metadata refer to the storage of a tensor")


@dataclass(frozen=True, slots=True)
class Recorded:
    """A metadata file that was read, but whose pieces were not decoded yet. `size` is that of the file in bytes."""

    file: SourceFile
    size: int
    outline: Outline
    _root: Opaque

    def decode(self, wanted: Callable[[str], bool]) -> Metadata:
        """Its content, with the pieces of the tensors that are wanted. FormatError where these are damaged."""
        with _naming(self.file):
            return _decode(self._root, self.outline, wanted, self.size)


def read_metadata(path: Path, file: SourceFile) -> Recorded:
    """Read one metadata file. FormatError, which names it, where it is damaged or hostile."""
    with _naming(file):
        with open_slice(path) as source:
            if source.size > MOST_BYTES:
                raise FormatError(f"has {source.size:,} bytes; at most {MOST_BYTES:,} are read")
            data = source.read(0, source.size)
        root = _unpickle(data, file)
        return Recorded(file, len(data), _outline(root), root)


@contextmanager
def _naming(file: SourceFile) -> Iterator[None]:
    """Errors within name the file."""
    try:
        yield
    except FormatError as error:
        hint = error.hint or "copy the file again, or take an earlier checkpoint"
        raise FormatError(f"{file}: {error.message}", hint=hint) from error.__cause__


def _unpickle(data: bytes, file: SourceFile) -> Any:
    """The object, within limits that grow with the pickle: torch's metadata build 0.4 to 0.65 `objects` per byte."""
    limits = Limits(operations=len(data) + 1, objects=100_000 + len(data) * 3 // 4)
    budget = Budget(limits)
    builder = RecordBuilder(Storages(file, NoStorages()), budget, limits)
    root, end = unpickle(data, builder, budget, limits)
    if end != len(data):
        raise FormatError(f"{len(data) - end} bytes follow the end of the pickle")
    return root


def _outline(root: Any) -> Outline:
    entries = root.get("state_dict_metadata") if isinstance(root, Opaque) else None
    if not isinstance(entries, dict):
        raise FormatError("not the metadata of torch.distributed.checkpoint")
    tensors: dict[str, int] = {}
    objects: dict[str, None] = {}
    for name, entry in entries.items():
        if not isinstance(name, str):
            raise FormatError("an entry has a name that is no text")
        kind = entry.cls.name if isinstance(entry, Opaque) else type(entry).__name__
        if kind == "BytesStorageMetadata":
            objects[name] = None
        elif kind == "TensorStorageMetadata":
            tensors[name] = _size_in_bytes(entry)
        else:
            raise FormatError(f"`{name}` is of a kind that we do not know: {kind}")
    return Outline(tensors, objects.keys(), dict(_paths(root.get("planner_data"))))


def _decode(root: Opaque, outline: Outline, wanted: Callable[[str], bool], size: int) -> Metadata:
    """The content of the root object of a pickle of `size` bytes."""
    entries = root.get("state_dict_metadata")
    places = _places(root.get("storage_data"))
    found = Metadata(files={place.path for place in places.values()}, paths=dict(outline.paths))
    found.objects = {name: places.get((name, None)) for name in outline.objects}
    pieces_left = size // BYTES_PER_PIECE
    for name, size_in_bytes in outline.tensors.items():
        if not wanted(name):
            found.skipped[name] = size_in_bytes
            continue
        chunks = entries[name].get("chunks")
        pieces_left -= len(chunks) if isinstance(chunks, list) else 0
        if pieces_left < 0:
            raise FormatError("its tensors have more pieces than it has room for: many share one list of them")
        found.tensors[name] = _tensor(name, entries[name], places)
    found.extra = {key: value for key, value in root.state.items() if key not in TORCH_KEYS and key != PLANS}
    return found


def _size_in_bytes(entry: Opaque) -> int:
    dtype, shape = _dtype(entry), entry.get("size")
    return prod(shape) * dtype.itemsize if isinstance(dtype, DType) and _are_counts(shape) else 0


def _dtype(entry: Opaque) -> DType | str | None:
    """The element type, or torch's name of it; None where none is recorded."""
    properties = entry.get("properties")
    state = properties.state if isinstance(properties, Opaque) else None
    found = state[0] if isinstance(state, tuple) and state else None
    dtype = found.path if isinstance(found, Global) else found
    return dtype if isinstance(dtype, (DType, str)) else None


def _tensor(name: str, entry: Opaque, places: Mapping[Index, Place]) -> TensorEntry:
    dtype, shape, chunks = _dtype(entry), entry.get("size"), entry.get("chunks")
    if not _are_counts(shape) or not isinstance(chunks, list):
        raise FormatError(f"`{name}` is described in a way that torch never writes")
    if prod([max(count, 1) for count in shape]) > LARGEST:
        raise FormatError(f"`{name}` of shape {shape} has too many elements")
    if dtype is None:
        raise FormatError(f"`{name}` is described in a way that torch never writes: with elements of no type")
    pieces = []
    for chunk in chunks:
        offsets, sizes = (chunk.get("offsets"), chunk.get("sizes")) if isinstance(chunk, Opaque) else (None, None)
        if not _are_counts(offsets) or not _are_counts(sizes) or not len(offsets) == len(sizes) == len(shape):
            raise FormatError(f"`{name}` has a chunk that torch never writes")
        pieces.append(Piece(Box(offsets, sizes), places.get((name, offsets))))
    return TensorEntry(dtype, shape, list(dict.fromkeys(pieces)))


def _places(found: Any) -> dict[Index, Place]:
    """`storage_data` by what torch compares: the index hint in a `MetadataIndex` is no part of its identity."""
    if not isinstance(found, dict):
        raise FormatError("it does not say where anything was written")
    places: dict[Index, Place] = {}
    for index, info in found.items():
        name, offset = (index.get("fqn"), index.get("offset")) if isinstance(index, Opaque) else (None, None)
        if not isinstance(name, str) or not (offset is None or _are_counts(offset)):
            raise FormatError("a chunk is named in a way that torch never writes")
        places[name, offset] = _place(info)
    return places


def _place(info: Any) -> Place:
    if isinstance(info, Opaque):
        path, offset, length = info.get("relative_path"), info.get("offset"), info.get("length")
        transforms = info.get("transform_descriptors") or ()
        if isinstance(path, str) and _are_counts((offset, length)) and _are_texts(transforms):
            return Place(path, offset, length, tuple(transforms))
    raise FormatError("a chunk was written to a place that torch never writes")


def _paths(found: Any) -> Iterator[tuple[str, Steps]]:
    """`planner_data`, if it has the form that torch's own planners give it."""
    for name, steps in found.items() if isinstance(found, dict) else ():
        is_path = isinstance(steps, tuple) and len(steps) <= MOST_STEPS
        if is_path and isinstance(name, str) and all(map(_is_step, steps)):
            yield name, steps


def _is_step(step: Any) -> bool:
    return type(step) is str or (type(step) is int and 0 <= step <= LARGEST)


def _are_texts(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple)) and len(value) <= MOST_STEPS and all(isinstance(item, str) for item in value)
    )


def _are_counts(value: Any) -> TypeGuard[tuple[int, ...]]:
    """Whether this is a shape, or offsets: a short tuple of integers that are not negative."""
    if not isinstance(value, tuple) or len(value) > DEFAULT_LIMITS.dimensions:
        return False
    return all(type(item) is int and 0 <= item <= LARGEST for item in value)
