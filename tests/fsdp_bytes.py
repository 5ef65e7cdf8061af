"""FSDP checkpoints by hand, without torch: DTensors and plain tensors in one archive per rank, which torch would read.

A tensor that is given by its shape alone has zeros for values, and they are a hole in the file: so a checkpoint of any
size takes neither time nor disk.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

import torch_bytes as opcodes

Array: TypeAlias = "np.ndarray[Any, Any]"
Content: TypeAlias = "Array | tuple[int, ...]"
"""The values of a tensor, or its shape alone: zeros, as a hole."""

_STORAGES = {
    "float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage", "float64": "DoubleStorage",
    "int64": "LongStorage", "int32": "IntStorage", "uint8": "ByteStorage", "bool": "BoolStorage",
}  # fmt: skip
_HOLE_DTYPE = np.dtype(ml_dtypes.bfloat16)
_FALSE = b"\x89"
REPLICATE = -1
"""The placement that cuts nothing; all others are the axes that they cut."""


@dataclass(frozen=True)
class Mesh:
    """A device mesh: sizes by the names of its dimensions; ranks count row-major."""

    dims: Mapping[str, int]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.dims.values())

    @property
    def world(self) -> int:
        return prod(self.sizes)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        return tuple(int(place) for place in np.unravel_index(rank, self.sizes))


def world(size: int, name: str = "fsdp") -> Mesh:
    """A mesh of one dimension."""
    return Mesh({name: size})


def cut(shape: Sequence[int], placements: Sequence[int], mesh: Mesh, rank: int) -> tuple[slice, ...]:
    """What a rank holds of a tensor whose placements cut from left to right, as `torch.chunk` cuts."""
    spans = [(0, length) for length in shape]
    for axis, parts, place in zip(placements, mesh.sizes, mesh.coordinate(rank), strict=True):
        if axis != REPLICATE:
            start, stop = spans[axis]
            step = -(-(stop - start) // parts)
            spans[axis] = (min(start + place * step, stop), min(start + (place + 1) * step, stop))
    return tuple(slice(*span) for span in spans)


@dataclass
class RankFile:
    """The state dict of one rank, entry by entry.

    package: where DTensor lives: `torch.distributed.tensor`, or until torch 2.4 `torch.distributed._tensor`.
    """

    mesh: Mesh
    rank: int
    package: str = "torch.distributed.tensor"
    _entries: list[bytes] = field(default_factory=list)
    _storages: list[bytes | int] = field(default_factory=list)
    _memo: dict[str, int] = field(default_factory=dict)

    def add_plain(self, name: str, content: Content) -> None:
        """A tensor without placements."""
        self.add_opcodes(name, self.tensor(content))

    def add_view(self, name: str, storage: bytes, shape: Sequence[int], strides: Sequence[int], offset: int) -> None:
        """A tensor in a storage that others share; `storage` comes from `keep`."""
        self.add_opcodes(name, opcodes.tensor(storage, shape, strides, offset))

    def add_dtensor(self, name: str, shape: Sequence[int], placements: Sequence[int], local: Content) -> None:
        """A DTensor of a global shape, of which this rank holds `local`."""
        kind = self._kind(local)
        strides = _strides(shape)
        cls = self._once("DTensor", opcodes.named(self.package, "DTensor"))
        dtype = opcodes.named("torch", kind)
        where = (
            self._once(
                "layout",
                opcodes.call(opcodes.named("torch.serialization", "_get_layout"), opcodes.text("torch.strided")),
            ),
            self._once("device", opcodes.call(opcodes.named("torch", "device"), opcodes.text("cpu"))),
        )
        geometry = (opcodes.counts(shape), opcodes.counts(strides), opcodes.integer(0))
        wrapper = opcodes.group(cls, dtype, *geometry, *where, _FALSE)
        tensor = self.tensor(local)
        spec = self._spec(shape, strides, dtype, placements)
        state = opcodes.group(b"N", opcodes.mapping({"_local_tensor": tensor, "_spec": spec}))
        rebuild = opcodes.named("torch._utils", "_rebuild_wrapper_subclass")
        entry = opcodes.call(opcodes.named("torch._tensor", "_rebuild_from_type_v2"), rebuild, cls, wrapper, state)
        self.add_opcodes(name, entry)

    def add_shard(self, name: str, array: Content, placements: Sequence[int] = (0,)) -> None:
        """A DTensor of which this rank holds what the placements give it."""
        if isinstance(array, tuple):
            where = cut(array, placements, self.mesh, self.rank)
            self.add_dtensor(name, array, placements, tuple(part.stop - part.start for part in where))
        else:
            self.add_dtensor(name, array.shape, placements, array[cut(array.shape, placements, self.mesh, self.rank)])

    def add_opcodes(self, name: str, value: bytes) -> None:
        """Any value, as the opcodes that leave it on the stack."""
        self._entries.append(opcodes.text(name) + value)

    def keep(self, content: Content) -> bytes:
        """A new storage with these values; returns the opcodes of its reference."""
        key, kind = str(len(self._storages)), self._kind(content)
        if isinstance(content, tuple):
            self._storages.append(prod(content) * _HOLE_DTYPE.itemsize)
            return opcodes.storage(key, prod(content), _STORAGES[kind])
        self._storages.append(np.ascontiguousarray(content).tobytes())
        return opcodes.storage(key, content.size, _STORAGES[kind])

    def write(self, path: Path, folder: str = "archive") -> None:
        """Write the archive, in which everything lies below `folder`."""
        pickle = opcodes.finish(b"}(" + b"".join(self._entries) + b"u")
        members: dict[str, bytes | int] = {"data.pkl": pickle, "byteorder": b"little"}
        members |= {f"data/{number}": storage for number, storage in enumerate(self._storages)}
        write_archive(path, members | {"version": b"3\n"}, folder)

    def tensor(self, content: Content) -> bytes:
        """A tensor with these values in a storage of its own, as opcodes."""
        shape = content if isinstance(content, tuple) else content.shape
        return opcodes.tensor(self.keep(content), shape, _strides(shape))

    @staticmethod
    def _kind(content: Content) -> str:
        return str(_HOLE_DTYPE if isinstance(content, tuple) else content.dtype)

    def _once(self, key: str, value: bytes) -> bytes:
        """The value at its first use, a reference to it at all others; torch's pickler does the same."""
        if key in self._memo:
            return b"h" + bytes([self._memo[key]])
        self._memo[key] = len(self._memo)
        return value + b"q" + bytes([self._memo[key]])

    def _spec(self, shape: Sequence[int], strides: Sequence[int], dtype: bytes, placements: Sequence[int]) -> bytes:
        module = f"{self.package}._dtensor_spec"
        mesh = self._once("mesh", self._mesh_record())
        size = opcodes.call(opcodes.named("torch", "Size"), opcodes.counts(shape))
        meta = opcodes.named(module, "TensorMeta") + opcodes.group(size, opcodes.counts(strides), dtype) + b"\x81"
        placed = opcodes.group(*[self._placement(axis) for axis in placements])
        state = {"mesh": mesh, "placements": placed, "tensor_meta": meta}
        return record(opcodes.named(module, "DTensorSpec"), state)

    def _placement(self, axis: int) -> bytes:
        module = f"{self.package}.placement_types"
        if axis == REPLICATE:
            return record(opcodes.named(module, "Replicate"), {})
        return record(opcodes.named(module, "Shard"), {"dim": opcodes.integer(axis)})

    def _mesh_record(self) -> bytes:
        sizes = self.mesh.sizes
        layout = {"shape": opcodes.counts(sizes), "stride": opcodes.counts(_strides(sizes))}
        state = {
            "_layout": record(opcodes.named("torch.distributed._mesh_layout", "_MeshLayout"), layout),
            "_mesh_dim_names": opcodes.group(*[opcodes.text(name) for name in self.mesh.dims]),
            "_flatten_rank_map": opcodes.counts(range(self.mesh.world)),
            "_rank": opcodes.integer(self.rank),
            "_coordinate_on_dim": opcodes.counts(self.mesh.coordinate(self.rank)),
        }
        return record(opcodes.named("torch.distributed.device_mesh", "DeviceMesh"), state)


def record(cls: bytes, state: Mapping[str, bytes]) -> bytes:
    """An object that is made empty and then given its state."""
    return cls + b")\x81" + opcodes.mapping(state) + b"b"


def write_archive(path: Path, members: Mapping[str, bytes | int], folder: str = "archive") -> None:
    """A zip of stored members, each payload at a multiple of 64 bytes; a number is so many zeros, left as a hole."""
    directory = bytearray()
    with path.open("wb") as file:
        for name, data in members.items():
            full = f"{folder}/{name}".encode()
            size = data if isinstance(data, int) else len(data)
            offset = file.tell()
            padding = -(offset + 34 + len(full)) % 64
            checksum = 0 if isinstance(data, int) else zlib.crc32(data)
            fixed = struct.pack("<5H3LH", 0, 0, 0, 0, 0, checksum, size, size, len(full))
            file.write(b"PK\x03\x04" + fixed + struct.pack("<H", padding + 4) + full)
            file.write(struct.pack("<2sH", b"FB", padding) + b"Z" * padding)
            if isinstance(data, int):
                file.seek(size, 1)
            else:
                file.write(data)
            directory += b"PK\x01\x02\0\0" + fixed + struct.pack("<4H2L", 0, 0, 0, 0, 0, offset) + full
        start = file.tell()
        end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, len(members), len(members), len(directory), start, 0)
        file.write(bytes(directory) + end)


def write_ranks(
    directory: Path, mesh: Mesh, tensors: Mapping[str, Content], placements: Sequence[int] = (0,), **config: Any
) -> Path:
    """One file per rank in verl's layout, all tensors with the same placements; `config` is the config.json, if any."""
    directory.mkdir(parents=True, exist_ok=True)
    for rank in range(mesh.world):
        file = RankFile(mesh, rank)
        for name, content in tensors.items():
            file.add_shard(name, content, placements)
        file.write(rank_path(directory, mesh, rank))
    if config:
        write_json(directory / "huggingface" / "config.json", config)
    return directory


def rank_path(directory: Path, mesh: Mesh, rank: int) -> Path:
    """The name that verl gives to a rank's file."""
    return directory / f"model_world_size_{mesh.world}_rank_{rank}.pt"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def numbers(*shape: int, dtype: Any = np.float32, start: int = 0) -> Array:
    """An array in which every element is another, as far as the type allows."""
    return (np.arange(prod(shape)) + start).reshape(shape).astype(dtype)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
