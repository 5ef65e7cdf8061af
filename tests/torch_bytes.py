"""Torch files by hand, byte by byte: pickles assembled from opcodes, and zip archives whose every field can lie."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unshard.formats.torch_file import StoredTensor, TorchFile, read_torch_file
from unshard.tensors import SourceFile

FILE = SourceFile("source", "model.pt")
MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
"""The first pickle of a legacy stream."""


# Pickles: each function gives the opcodes that leave one object on the stack -----------------------------------------


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def integer(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def group(*parts: bytes) -> bytes:
    """A tuple."""
    return b"(" + b"".join(parts) + b"t"


def mapping(entries: Mapping[str, bytes]) -> bytes:
    return b"}(" + b"".join(text(key) + value for key, value in entries.items()) + b"u"


def call(function: bytes, *args: bytes) -> bytes:
    return function + group(*args) + b"R"


def counts(values: Sequence[int]) -> bytes:
    return group(*[integer(value) for value in values])


def storage(key: str = "0", numel: int = 6, kind: str = "FloatStorage", module: str = "torch") -> bytes:
    reference = group(text("storage"), named(module, kind), text(key), text("cpu"), integer(numel))
    return reference + b"Q"


def tensor(
    kept: bytes, shape: Sequence[int] = (2, 3), strides: Sequence[int] = (3, 1), offset: int = 0, *more: bytes
) -> bytes:
    hooks = call(named("collections", "OrderedDict"))
    args = (kept, integer(offset), counts(shape), counts(strides), b"\x89", hooks, *more)
    return call(named("torch._utils", "_rebuild_tensor_v2"), *args)


def finish(body: bytes, protocol: int = 2) -> bytes:
    return bytes([0x80, protocol]) + body + b"."


MODEL = finish(mapping({"weight": tensor(storage())}))
"""A state dict of one float32 tensor of shape (2, 3) on storage `0`."""
PAYLOAD = struct.pack("<6f", *range(6))


# Archives ------------------------------------------------------------------------------------------------------------


@dataclass
class Entry:
    """One member. `local_*` and `listed_*` are what the two headers claim, where it differs from the truth."""

    name: str
    data: bytes
    method: int = 0
    flags: int = 0x0808
    alignment: int = 64
    local_name: str | None = None
    local_method: int | None = None
    local_size: int = 0
    listed_size: int | None = None
    listed_offset: int | None = None
    extra: bytes = b""

    @property
    def packed(self) -> bytes:
        if self.method != 8:
            return self.data
        packer = zlib.compressobj(9, zlib.DEFLATED, -15)
        return packer.compress(self.data) + packer.flush()


def torch_members(pickle: bytes = MODEL, payload: bytes = PAYLOAD, folder: str = "archive") -> list[Entry]:
    """What torch.save writes, in its order."""
    contents = {"data.pkl": pickle, "byteorder": b"little", "data/0": payload, "version": b"3\n"}
    return [Entry(f"{folder}/{name}", data) for name, data in contents.items()]


def archive(
    entries: Sequence[Entry],
    *,
    between: bytes = b"",
    comment: bytes = b"",
    count: int | None = None,
    directory_shift: int = 0,
    zip64: bool = False,
) -> bytes:
    """A zip of these members: `between` stands before the directory, `count` and `directory_shift` falsify its end."""
    body = bytearray()
    directory = bytearray()
    for entry in entries:
        offset = len(body) if entry.listed_offset is None else entry.listed_offset
        directory += _listed(entry, offset)
        body += _local(entry, len(body))
    body += between
    start = len(body) + directory_shift
    total = len(entries) if count is None else count
    body += directory
    if zip64:
        at = len(body)
        body += struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, total, total, len(directory), start)
        body += struct.pack("<4sLQL", b"PK\x06\x07", 0, at, 1)
        total, size, start = 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF
    else:
        size = len(directory)
    body += struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, total, total, size, start, len(comment)) + comment
    return bytes(body)


def _local(entry: Entry, offset: int) -> bytes:
    name = (entry.name if entry.local_name is None else entry.local_name).encode()
    method = entry.method if entry.local_method is None else entry.local_method
    padding = -(offset + 30 + len(name) + 4) % entry.alignment
    extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    size = entry.local_size
    head = struct.pack("<4s5H3L2H", b"PK\x03\x04", 0, entry.flags, method, 0, 0, 0, size, size, len(name), len(extra))
    descriptor = struct.pack("<4s3L", b"PK\x07\x08", zlib.crc32(entry.data), len(entry.packed), len(entry.data))
    return head + name + extra + entry.packed + (descriptor if entry.packed and entry.flags & 8 else b"")


def _listed(entry: Entry, offset: int) -> bytes:
    name = entry.name.encode()
    size = len(entry.data) if entry.listed_size is None else entry.listed_size
    packed = len(entry.packed) if entry.listed_size is None or entry.method else entry.listed_size
    head = struct.pack(
        "<4s6H3L", b"PK\x01\x02", 0, 0, entry.flags, entry.method, 0, 0, zlib.crc32(entry.data), packed, size
    )
    return head + struct.pack("<5H2L", len(name), len(entry.extra), 0, 0, 0, 0, offset) + name + entry.extra


# Legacy streams ------------------------------------------------------------------------------------------------------


def legacy(
    body: bytes, storages: Mapping[str, tuple[int, bytes]], *, little: bool = True, protocol: int = 1001
) -> bytes:
    """The stream before torch 1.6; `storages` are number of elements and bytes by key."""
    system = finish(mapping({"protocol_version": integer(protocol), "little_endian": b"\x88" if little else b"\x89"}))
    keys = finish(b"](" + b"".join(text(key) for key in sorted(storages)) + b"e")
    kept = b"".join(struct.pack("<q", storages[key][0]) + storages[key][1] for key in sorted(storages))
    return MAGIC + finish(integer(protocol)) + system + finish(body) + keys + kept


def legacy_storage(key: str = "7", numel: int = 6, kind: str = "FloatStorage", view: bytes = b"N") -> bytes:
    return group(text("storage"), named("torch", kind), text(key), text("cpu"), integer(numel), view) + b"Q"


# Reading -------------------------------------------------------------------------------------------------------------


def read(directory: Path, data: bytes) -> TorchFile:
    """Write the bytes and read them as a torch file."""
    path = directory / "model.pt"
    path.write_bytes(data)
    return read_torch_file(path, FILE)


def read_pickle(directory: Path, body: bytes, protocol: int = 2) -> object:
    """The object that a pickle of these opcodes describes, in an archive with storage `0`."""
    return read(directory, archive(torch_members(finish(body, protocol)))).root


def weight(root: object) -> StoredTensor:
    """The tensor of that name in a state dict."""
    assert isinstance(root, dict)
    found = root["weight"]
    assert isinstance(found, StoredTensor)
    return found


def payload_of(path: Path, tensor: StoredTensor) -> bytes:
    """The bytes that a file holds where the tensor's storage says."""
    storage = tensor.storage
    return path.read_bytes()[storage.offset : storage.offset + storage.nbytes]
