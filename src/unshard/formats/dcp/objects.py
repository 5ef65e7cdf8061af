"""Entries that are no tensors: anything that torch.save takes, as inert records."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from unshard.errors import FormatError
from unshard.files.zstd import decode
from unshard.formats.dcp.transforms import encoding_of
from unshard.formats.torch_file import DEFAULT_LIMITS, read_torch_file
from unshard.formats.torch_file.reader import read_slice
from unshard.formats.torch_file.slices import FileSlice, open_slice
from unshard.tensors import Encoded, SourceFile

LARGEST = 1 << 30
"""Bytes of a decoded item. Random states and schedules take some megabytes."""


@dataclass(frozen=True, slots=True)
class Item:
    """`length` bytes of a file from byte `offset` on, in which torch.save put an object.

    `path` is what to open, `file` its name. `transforms` as in `metadata.Place`.
    """

    file: SourceFile
    path: Path
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


def read_item(item: Item) -> Any:
    """The object: dicts, lists, numbers, text and inert records. FormatError where it is damaged or hostile."""
    try:
        encoding = encoding_of(item.transforms)
        if encoding is not None:
            return _read_encoded(item, encoding)
    except FormatError as error:
        raise FormatError(f"{item.file}: {error.message}", hint=error.hint) from error.__cause__
    return read_torch_file(item.path, item.file, start=item.offset, length=item.length).root


def _read_encoded(item: Item, encoding: str) -> Any:
    """The object of a compressed item, which is decoded to a temporary file and read there."""
    try:
        with tempfile.TemporaryFile(buffering=0) as decoded:
            size = _decode(item, decoded)
            file = replace(item.file, encoded=Encoded(encoding, item.offset, item.length, size))
            return read_slice(FileSlice(decoded.fileno(), 0, size), file, DEFAULT_LIMITS).root
    except OSError as error:
        raise FormatError(f"cannot be decoded: {error.strerror or error}", hint="set TMPDIR to another disk") from error


def _decode(item: Item, decoded: IO[bytes]) -> int:
    """The bytes that were written."""
    size = 0
    with open_slice(item.path, item.offset, item.length) as source:
        for piece in decode(source.read, 0, item.length):
            size += len(piece)
            if size > LARGEST:
                raise FormatError(f"the item at byte {item.offset:,} decodes to more than {LARGEST:,} bytes")
            decoded.write(piece)
    return size
