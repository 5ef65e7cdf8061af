"""What `.metadata` says: which entries there are, of which chunks they are made, and where each chunk was written.

The file is one pickle (torch `distributed/checkpoint/metadata.py` and `filesystem.py`): a `Metadata` with
`state_dict_metadata` (name → `TensorStorageMetadata` or `BytesStorageMetadata`), `storage_data` (`MetadataIndex` →
`_StorageInfo`) and `planner_data` (name → nested path). The classes are found by their last name: their modules have
moved between releases, and Megatron-Core has a subclass of the root.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from unshard.dtypes import DType
from unshard.errors import FormatError
from unshard.formats.torch_file.builder import RecordBuilder
from unshard.formats.torch_file.limits import Limits
from unshard.formats.torch_file.machine import Budget
from unshard.formats.torch_file.records import Global, Opaque
from unshard.formats.torch_file.slices import open_slice
from unshard.formats.torch_file.storages import Storages
from unshard.formats.torch_file.unpickler import unpickle
from unshard.tensors import Box, SourceFile

LIMITS = Limits(pickle_bytes=1 << 30, operations=120_000_000, objects=80_000_000)
KNOWN = frozenset({"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"})

Key: TypeAlias = tuple[str, tuple[int, ...] | None]
"""A name and the offsets of a chunk; None for entries that are no tensors."""
Steps: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor by its metadata. `dtype` is the name that torch gives it, where it is none of ours."""

    dtype: DType | str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """`length` bytes of the file `path`, which is relative to the directory, from byte `offset` on.

    `transforms` are the descriptors of what was done to the bytes (`stream.zstd`, …), innermost first.
    """

    path: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


@dataclass(slots=True)
class Metadata:
    """The content of one `.metadata`, or of several that were merged. `extra` are attributes that torch has not."""

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    objects: list[str] = field(default_factory=list)
    places: dict[Key, Place] = field(default_factory=dict)
    paths: dict[str, Steps] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


class NoStorages:
    """The location of storages in a pickle that has none."""

    def find(self, key: str, nbytes: int, numel: int) -> int:
        raise FormatError("the metadata refer to the storage of a tensor")


def read_metadata(path: Path, file: SourceFile) -> Metadata:
    """Read one `.metadata` file. FormatError, which names it, where it is damaged or hostile."""
    try:
        with open_slice(path) as source:
            if source.size > LIMITS.pickle_bytes:
                raise FormatError(f"has {source.size:,} bytes; at most {LIMITS.pickle_bytes:,} are read")
            data = source.read(0, source.size)
        budget = Budget(LIMITS)
        builder = RecordBuilder(Storages(file, NoStorages()), budget, LIMITS)
        root, _ = unpickle(data, builder, budget, LIMITS)
        return _decode(root)
    except FormatError as error:
        hint = error.hint or "copy the file again, or take an earlier checkpoint"
        raise FormatError(f"{file}: {error.message}", hint=hint) from error.__cause__


def _decode(root: Any) -> Metadata:
    if not isinstance(root, Opaque) or not isinstance(root.get("state_dict_metadata"), dict):
        raise FormatError("not the metadata of torch.distributed.checkpoint")
    found = Metadata(extra={key: value for key, value in root.state.items() if key not in KNOWN})
    for name, entry in root.get("state_dict_metadata").items():
        if not isinstance(name, str):
            raise FormatError("an entry has a name that is no text")
        kind = entry.cls.name if isinstance(entry, Opaque) else type(entry).__name__
        if kind == "TensorStorageMetadata":
            found.tensors[name] = _tensor_entry(name, entry)
        elif kind == "BytesStorageMetadata":
            found.objects.append(name)
        else:
            raise FormatError(f"`{name}` is of a kind that we do not know: {kind}")
    places = root.get("storage_data")
    if not isinstance(places, dict):
        raise FormatError("it does not say where the chunks were written")
    for index, info in places.items():
        found.places[_key(index)] = _place(info)
    paths = root.get("planner_data")
    if isinstance(paths, dict):
        found.paths = {name: steps for name, steps in paths.items() if _is_path(name, steps)}
    return found


def _is_path(name: Any, steps: Any) -> bool:
    return isinstance(name, str) and isinstance(steps, tuple) and all(isinstance(step, (str, int)) for step in steps)


def _tensor_entry(name: str, entry: Opaque) -> TensorEntry:
    properties, shape, chunks = entry.get("properties"), _counts(entry.get("size")), entry.get("chunks")
    state = properties.state if isinstance(properties, Opaque) else None
    if shape is None or not isinstance(chunks, list) or not isinstance(state, tuple) or not state:
        raise FormatError(f"`{name}` is described in a way that torch never writes")
    dtype = state[0].path if isinstance(state[0], Global) else state[0]
    if not isinstance(dtype, (DType, str)):
        raise FormatError(f"`{name}` has no dtype")
    boxes = []
    for chunk in chunks:
        offsets = _counts(chunk.get("offsets")) if isinstance(chunk, Opaque) else None
        sizes = _counts(chunk.get("sizes")) if isinstance(chunk, Opaque) else None
        if offsets is None or sizes is None or not len(offsets) == len(sizes) == len(shape):
            raise FormatError(f"`{name}` has a chunk that torch never writes")
        boxes.append(Box(offsets, sizes))
    return TensorEntry(dtype, shape, tuple(boxes))


def _key(index: Any) -> Key:
    if isinstance(index, Opaque) and isinstance(name := index.get("fqn"), str):
        offset = index.get("offset")
        if offset is None:
            return name, None
        counts = _counts(offset)
        if counts is not None:
            return name, counts
    raise FormatError("a chunk is named in a way that torch never writes")


def _place(info: Any) -> Place:
    if isinstance(info, Opaque):
        path, offset, length = info.get("relative_path"), info.get("offset"), info.get("length")
        transforms = info.get("transform_descriptors") or ()
        if (
            isinstance(path, str)
            and _is_count(offset)
            and _is_count(length)
            and isinstance(transforms, (list, tuple))
            and all(isinstance(item, str) for item in transforms)
        ):
            return Place(path, offset, length, tuple(transforms))
    raise FormatError("a chunk was written to a place that torch never writes")


def _counts(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, tuple) and len(value) <= LIMITS.dimensions and all(_is_count(item) for item in value):
        return value
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63
