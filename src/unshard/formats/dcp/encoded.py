"""Items that a writer compressed: what they hold, by their head alone, and the proof once they are decoded.

A checkpoint of 100 GB is not decoded to be looked at: the first block of each item tells the type, the shape and where
the elements begin. What only the end of the archive can prove (that its directory sees the same tensor, and that the
checksum of the elements holds) is proven by `prove` when the item is decoded, before any element of it is used.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unshard.errors import FormatError
from unshard.files.zstd import LARGEST_BLOCK, SMALLEST_BLOCK, decode
from unshard.formats.dcp.metadata import Place
from unshard.formats.dcp.transforms import TransformError
from unshard.formats.state_dict import what_it_is
from unshard.formats.torch_file import Limits, StoredTensor, UnsupportedTensor
from unshard.formats.torch_file.archive import read_archive
from unshard.formats.torch_file.builder import RecordBuilder
from unshard.formats.torch_file.machine import Budget
from unshard.formats.torch_file.reader import read_slice
from unshard.formats.torch_file.slices import FileSlice
from unshard.formats.torch_file.storages import Storages
from unshard.formats.torch_file.unpickler import unpickle
from unshard.formats.torch_file.zip_file import TorchZip
from unshard.formats.torch_file.zip_head import ZipHead
from unshard.tensors import Encoded, SourceFile

ITEM_LIMITS = Limits(pickle_bytes=1 << 16, directory_bytes=1 << 16, operations=10_000, objects=10_000)
"""Of an item with one tensor. Torch writes about 300 bytes of pickle, and 400 of directory."""

LONGEST_HEAD = 1 << 14
"""Bytes. Heads have 400 to 1,100; with a `.storage_alignment` of pages, a few of these."""

_AHEAD = 32 << 10
"""Bytes of a head's first read. An incompressible block has four times as many, and needs a second read."""

_EMPTY = bytes.fromhex("28b52ffd2000010000")
"""The stream of no bytes. With `SerializationFormat.SAFETENSORS` torch writes one for each tensor, and then all tensors
uncompressed, at a place that it does not record."""

_AGAIN = "the file was damaged after it was written: copy it again, or take an earlier checkpoint"


def read_encoded(source: FileSlice, file: SourceFile, place: Place, encoding: str) -> StoredTensor:
    """The tensor that an item promises to hold. Its storage is a part of the decoded item.

    Raises FormatError where the head is damaged, or is not that of a tensor; TransformError where the tensor lies
    elsewhere.
    """
    try:
        tensor = as_tensor(_unpickle(ZipHead(_read_head(source, place)), file))
        storage = tensor.storage
        size = storage.offset + storage.nbytes
        if size > place.length // SMALLEST_BLOCK * LARGEST_BLOCK:
            raise FormatError(f"{place.length:,} bytes cannot decode to the {size:,} that they promise", hint=_AGAIN)
    except FormatError as error:
        if _EMPTY.startswith(source.read(place.offset, min(len(_EMPTY), place.length))):
            raise TransformError(
                "written with SerializationFormat.SAFETENSORS and an extension, which torch cannot load either",
                hint="save the checkpoint again with one of the two",
            ) from None
        message = f"{file}: the item at byte {place.offset:,}: {error.message}"
        raise FormatError(message, hint=error.hint) from error.__cause__
    encoded = Encoded(encoding, place.offset, place.length, size, _describe(tensor, 0))
    tensor.storage = replace(storage, file=replace(file, encoded=encoded))
    return tensor


def prove(descriptor: int, start: int, size: int, holds: str) -> None:
    """Compare a decoded item, `size` bytes from byte `start` of a file, with what its head promised.

    Raises FormatError where it is damaged, or is not the tensor that was described.
    """
    source = FileSlice(descriptor, start, size)
    tensor = as_tensor(read_slice(source, SourceFile("", ""), ITEM_LIMITS).root)
    found = _describe(tensor, start)
    if found != holds:
        raise FormatError(f"its directory tells of {found}, its first bytes of {holds}", hint=_AGAIN)
    TorchZip(read_archive(source, ITEM_LIMITS)).check_storage(tensor.storage.key)


def as_tensor(value: Any) -> StoredTensor:
    """What an item holds. Raises FormatError where that is anything but a tensor that can be read."""
    if isinstance(value, StoredTensor):
        return value
    what = value.reason if isinstance(value, UnsupportedTensor) else f"is {what_it_is(value)}"
    raise FormatError(f"the tensor {what}")


def _read_head(source: FileSlice, place: Place) -> bytes:
    """At least the first `LONGEST_HEAD` bytes of the decoded item, or all of it."""
    pieces, size = [], 0
    for piece in decode(source.read, place.offset, place.length, ahead=_AHEAD):
        pieces.append(piece)
        size += len(piece)
        if size >= LONGEST_HEAD:
            break
    return b"".join(pieces)


def _unpickle(head: ZipHead, file: SourceFile) -> Any:
    budget = Budget(ITEM_LIMITS)
    builder = RecordBuilder(Storages(file, head), budget, ITEM_LIMITS)
    return unpickle(head.pickle, builder, budget, ITEM_LIMITS)[0]


def _describe(tensor: StoredTensor, start: int) -> str:
    """All that tells where the elements lie and what they are, in an item that begins at byte `start`."""
    storage = tensor.storage
    place = f"{storage.nbytes} bytes at {storage.offset - start}"
    kind = f" as {tensor.cls.path}" if tensor.cls else ""
    view = f"{tensor.dtype} {list(tensor.shape)}, strides {list(tensor.strides)}, from element {tensor.offset}"
    return f"{view} of {place}{kind}"
