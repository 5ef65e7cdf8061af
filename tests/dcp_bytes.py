"""Directories of torch.distributed.checkpoint by hand: metadata from opcodes, items from archives, no PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

import torch_bytes as tb
from assembled import gather
from unshard.tensors import Tensor

MODULE = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
STORAGES = {"float32": "FloatStorage", "float16": "HalfStorage", "int64": "LongStorage"}
ROOT = "here"
ZSTD = "stream.zstd/1"


def instance(name: str, state: bytes, module: str = MODULE) -> bytes:
    """An object of a class, with its state."""
    return tb.named(module, name) + b")\x81" + state + b"b"


def size(values: Sequence[int]) -> bytes:
    return tb.call(tb.named("torch", "Size"), tb.counts(values))


def listed(items: Sequence[bytes]) -> bytes:
    return b"](" + b"".join(items) + b"e"


def pairs(entries: Sequence[tuple[bytes, bytes]]) -> bytes:
    """A dict of any keys."""
    return b"}(" + b"".join(key + value for key, value in entries) + b"u"


def chunk(offsets: Sequence[int], sizes: Sequence[int]) -> bytes:
    return instance("ChunkStorageMetadata", tb.mapping({"offsets": size(offsets), "sizes": size(sizes)}))


def tensor_entry(shape: Sequence[int], chunks: Sequence[bytes], dtype: str = "float32", module: str = MODULE) -> bytes:
    encoding = tb.call(tb.named(module, "_MEM_FORMAT_ENCODING"), tb.integer(0))
    layout = tb.call(tb.named("torch.serialization", "_get_layout"), tb.text("torch.strided"))
    properties = tb.group(tb.named("torch", dtype), layout, b"\x89", encoding, b"\x89")
    state = {"properties": instance("TensorProperties", properties, module), "size": size(shape)}
    return instance("TensorStorageMetadata", tb.mapping({**state, "chunks": listed(chunks)}))


def bytes_entry() -> bytes:
    return instance("BytesStorageMetadata", b"}")


def index(name: str, offsets: Sequence[int] | None = None, hint: int | None = None) -> bytes:
    """A `MetadataIndex`; objects have no offset at all, or None."""
    state = {"fqn": tb.text(name), "index": b"N" if hint is None else tb.integer(hint)}
    if offsets is not None:
        state["offset"] = size(offsets)
    return instance("MetadataIndex", tb.mapping(state))


def info(path: str, offset: int, length: int, transforms: Sequence[str] = ()) -> bytes:
    state = {"relative_path": tb.text(path), "offset": tb.integer(offset), "length": tb.integer(length)}
    if transforms:
        state["transform_descriptors"] = listed([tb.text(name) for name in transforms])
    return instance("_StorageInfo", tb.mapping(state), FILESYSTEM)


def metadata(
    entries: Mapping[str, bytes],
    places: Sequence[tuple[bytes, bytes]],
    *,
    cls: str = "Metadata",
    paths: bytes = b"N",
    **attributes: bytes,
) -> bytes:
    state = {"state_dict_metadata": tb.mapping(entries), "planner_data": paths, "storage_data": pairs(places)}
    return tb.finish(instance(cls, tb.mapping({**state, **attributes})), 4)


def item(array: np.ndarray) -> bytes:
    """What torch.save writes of a tensor with these elements, in this order of axes."""
    base = array if array.base is None else array.base
    kept = tb.storage(numel=base.size, kind=STORAGES[array.dtype.name])
    start = (array.ctypes.data - base.ctypes.data) // array.itemsize if array.size else 0
    strides = [step // array.itemsize for step in array.strides]
    pickle = tb.finish(tb.tensor(kept, array.shape, strides, start))
    return tb.archive(tb.torch_members(pickle, base.tobytes("A")))


def compress(data: bytes, **options: bool) -> bytes:
    """A stream of one frame, whose header does not tell how long the content is."""
    zstandard = pytest.importorskip("zstandard")
    stream = zstandard.ZstdCompressor(**options).compressobj()
    return stream.compress(data) + stream.flush()  # type: ignore[no-any-return]


@dataclass
class Writer:
    """Writes pieces one after the other into files, and the metadata last.

    Pieces are given with the box that is recorded; those that are not `placed` are missing from the metadata's places.
    `compressed` writes every item through zstd, as torch's `ZStandard` extension does.
    """

    directory: Path
    shapes: dict[str, tuple[Sequence[int], str]] = field(default_factory=dict)
    chunks: dict[str, list[bytes]] = field(default_factory=dict)
    objects: list[str] = field(default_factory=list)
    places: list[tuple[bytes, bytes]] = field(default_factory=list)
    compressed: bool = False

    def declare(self, name: str, shape: Sequence[int], dtype: str = "float32") -> None:
        self.shapes[name] = shape, dtype
        self.chunks[name] = []

    def write(
        self,
        name: str,
        offsets: Sequence[int],
        array: np.ndarray,
        file: str = "__0_0.distcp",
        *,
        sizes: Sequence[int] | None = None,
        transforms: Sequence[str] = (),
        placed: bool = True,
    ) -> None:
        """One piece of a tensor; `sizes` is what is recorded, if it is not the shape of the array."""
        recorded = array.shape if sizes is None else sizes
        self.write_item(name, offsets, recorded, item(array), file, transforms, placed=placed)

    def write_item(
        self,
        name: str,
        offsets: Sequence[int],
        sizes: Sequence[int],
        data: bytes,
        file: str = "__0_0.distcp",
        transforms: Sequence[str] = (),
        *,
        placed: bool = True,
    ) -> None:
        """One piece of a tensor, whatever its bytes are."""
        self.chunks[name].append(chunk(offsets, sizes))
        place = self._append(file, data, transforms)
        if placed:
            self.places.append((index(name, offsets, hint=len(self.places)), place))

    def write_object(self, name: str, pickle: bytes, file: str = "__0_0.distcp") -> None:
        self.objects.append(name)
        place = self._append(file, tb.archive(tb.torch_members(tb.finish(pickle), b"")))
        self.places.append((index(name), place))

    def _append(self, file: str, data: bytes, transforms: Sequence[str] = ()) -> bytes:
        path = self.directory / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.compressed and not transforms:
            data, transforms = compress(data), [ZSTD]
        with path.open("ab") as stream:
            start = stream.tell()
            stream.write(data)
        return info(file, start, len(data), transforms)

    def finish(self, name: str = ".metadata", **attributes: bytes) -> Path:
        entries = {name: tensor_entry(shape, self.chunks[name], dtype) for name, (shape, dtype) in self.shapes.items()}
        entries |= {name: bytes_entry() for name in self.objects}
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / name).write_bytes(metadata(entries, self.places, **attributes))
        return self.directory


def sharded(directory: Path, arrays: Mapping[str, np.ndarray], ranks: int = 2) -> Writer:
    """Every array cut into equal rows, one piece per rank, before the metadata are written."""
    writer = Writer(directory)
    for name, array in arrays.items():
        writer.declare(name, array.shape, array.dtype.name)
        rows = -(-len(array) // ranks)
        for rank in range(ranks):
            piece = array[rank * rows : (rank + 1) * rows].copy()
            offsets = (min(rank * rows, len(array)), *[0 for _ in array.shape[1:]])
            writer.write(name, offsets, piece, f"__{rank}_0.distcp")
    return writer


def read_array(tensor: Tensor, directory: Path) -> np.ndarray:
    """The elements of a tensor whose files lie under the root `here`."""
    return np.frombuffer(gather(tensor, {ROOT: directory}), tensor.dtype.numpy).reshape(tensor.shape)


def flatten(state: Mapping[str, object], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], object]:
    """The leaves of nested dicts by their paths, as torch flattens them."""
    leaves: dict[tuple[str, ...], object] = {}
    for key, value in state.items():
        leaves |= flatten(value, (*path, key)) if isinstance(value, Mapping) else {(*path, key): value}
    return leaves


def save(directory: Path, state: Mapping[str, object], ranks: int = 2, *, nested: bool = True) -> Path:
    """What `dcp.save` writes of nested dicts of arrays and numbers: arrays cut into rows, all else by rank 0.

    nested: whether the planner flattened the state and recorded the paths.
    """
    writer, paths = Writer(directory), []
    for steps, value in flatten(state).items():
        key = ".".join(steps)
        paths.append((tb.text(key), tb.group(*map(tb.text, steps))))
        if not isinstance(value, np.ndarray):
            writer.write_object(key, tb.integer(value) if isinstance(value, int) else tb.text(str(value)))
            continue
        writer.declare(key, value.shape, value.dtype.name)
        if value.ndim == 0:
            writer.write(key, (), value)
            continue
        rows = -(-len(value) // ranks)
        for rank in range(ranks):
            start = min(rank * rows, len(value))
            offsets = (start, *[0 for _ in value.shape[1:]])
            writer.write(key, offsets, value[start : start + rows].copy(), f"__{rank}_0.distcp")
    return writer.finish(paths=pairs(paths)) if nested else writer.finish()
