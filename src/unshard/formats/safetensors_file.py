"""One safetensors file: 8 bytes of header length, a JSON header, the bytes of the tensors.

The checks are those of huggingface/safetensors, `Metadata::validate` in `safetensors/src/tensor.rs`, and a few more: no
name twice, no control characters in names, no fields that nobody defined. After them, holes, overlaps, overflows and
trailing bytes are impossible. The work and the memory are proportional to the header's length, whatever it says.
"""

from __future__ import annotations

import json
import os
import re
import stat
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from unshard.dtypes import BY_NAME, DType
from unshard.errors import FormatError, ModelError, OutputError
from unshard.formats.json_text import JsonText, is_unicode
from unshard.tensors import SourceFile, Tensor, contiguous_chunk
from unshard.words import shorten

MAX_HEADER_SIZE = 100_000_000
"""Bytes; the library's own limit."""

MAX_AXES = 32
"""What every numpy can hold."""

_METADATA = "__metadata__"
_ENTRY_LIMIT = 2048
_ENTRY_FIELDS = {"dtype", "shape", "data_offsets"}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_ALIGNMENT = 8
_U64 = 1 << 64


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """What a header says.

    tensors:  name → tensor of one contiguous chunk, in the header's order.
    metadata: the header's `__metadata__`; empty where there is none.
    """

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


def read_header(path: Path, file: SourceFile, start: int = 0) -> SafetensorsFile:
    """The tensors of the safetensors file at `path`, whose extents will name `file`; `start`: the bytes before it.

    Raises FormatError for anything that the safetensors library refuses too, and for what is listed above.
    """
    header, data_start, size = _read_bytes(path, start)
    try:
        return _parse(header, data_start, size, file)
    except ValueError as error:
        raise FormatError(f"{path}: not a valid safetensors file: {error}", hint=_DAMAGED) from None


_DAMAGED = "the file is damaged or was not written by safetensors; copy it again from where it came from"


def _read_bytes(path: Path, start: int) -> tuple[bytes, int, int]:
    """The header, the byte at which the data begins, and the size of the file. What lies before `start` is ignored."""
    try:
        with open(path, "rb", opener=_open_at_once) as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise FormatError(f"{path}: not a regular file")
            stream.seek(start)
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            size = status.st_size - start
            if len(prefix) < 8 or length > min(MAX_HEADER_SIZE, size - 8):
                raise _not_safetensors(path, prefix, length, size)
            header = stream.read(length)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from error
    if len(header) != length:
        raise FormatError(f"{path}: ends in the header: {length:,} bytes announced, {len(header):,} found")
    return header, start + 8 + length, status.st_size


def _open_at_once(path: str, flags: int) -> int:
    """Opens without waiting for the other end of a named pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _not_safetensors(path: Path, prefix: bytes, length: int, size: int) -> FormatError:
    if prefix.startswith(b"version "):
        return FormatError(f"{path}: a Git LFS pointer, not the file itself", hint="git lfs pull")
    if prefix.startswith((b"PK\x03\x04", b"\x80\x02")):
        return FormatError(f"{path}: a file written by torch.save under a safetensors name", hint="rename it to .bin")
    if len(prefix) < 8:
        return FormatError(f"{path}: {size} bytes are too few for a safetensors file", hint=_DAMAGED)
    if length > MAX_HEADER_SIZE:
        return FormatError(f"{path}: a header of {length:,} bytes; {MAX_HEADER_SIZE:,} are allowed", hint=_DAMAGED)
    return FormatError(f"{path}: a header of {length:,} bytes in a file of {size:,}: it is truncated", hint=_DAMAGED)


def _parse(header: bytes, data_start: int, size: int, file: SourceFile) -> SafetensorsFile:
    try:
        text = JsonText(header.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"the header is not UTF-8 at byte {8 + error.start}") from None
    if not header.startswith(b"{"):
        text.fail("the header must begin with '{'")
    metadata: dict[str, str] = {}
    entries: dict[str, _Entry] = {}
    for name in text.members():
        if name == _METADATA:
            metadata = text.strings()
            continue
        if _CONTROL.search(name):
            raise ValueError(f"the tensor name {_shown(name)} contains control characters")
        entries[name] = _parse_entry(name, text.value(_ENTRY_LIMIT))
    text.expect_end()
    _prove_contiguous(entries, size - data_start)
    tensors = {name: entry.tensor(name, data_start, file) for name, entry in entries.items()}
    return SafetensorsFile(tensors, metadata)


@dataclass(frozen=True, slots=True)
class _Entry:
    """`shape` counts items (see `DType.packed`); `start` and `stop` are bytes from the start of the data."""

    dtype: DType
    shape: tuple[int, ...]
    start: int
    stop: int

    def tensor(self, name: str, data_start: int, file: SourceFile) -> Tensor:
        chunk = contiguous_chunk(file, data_start + self.start, self.shape, self.dtype)
        return Tensor(name, self.dtype, self.shape, (chunk,) if self.stop > self.start else ())


def _parse_entry(name: str, entry: Any) -> _Entry:
    where = f"tensor {_shown(name)}"
    if not isinstance(entry, dict) or entry.keys() != _ENTRY_FIELDS:
        raise ValueError(f"{where}: expected an object of dtype, shape and data_offsets, found {str(entry)[:120]}")
    dtype = BY_NAME.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise ValueError(f"{where}: unknown dtype {str(entry['dtype'])[:40]!r}")
    shape, offsets = _sizes(entry["shape"]), _sizes(entry["data_offsets"])
    if shape is None or len(shape) > MAX_AXES:
        raise ValueError(f"{where}: {str(entry['shape'])[:120]} is no shape")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{where}: {str(entry['data_offsets'])[:120]} are no data offsets")
    if dtype.packed > 1:
        if not shape or shape[-1] % dtype.packed:
            raise ValueError(f"{where}: {dtype} elements come {dtype.packed} to a byte, so the last axis must be even")
        shape = (*shape[:-1], shape[-1] // dtype.packed)
    needed = dtype.itemsize
    for length in shape:
        needed *= length
        if needed >= _U64:
            raise ValueError(f"{where}: shape {shape} overflows")
    if offsets[1] - offsets[0] != needed:
        raise ValueError(
            f"{where}: {dtype} of shape {shape} takes {needed:,} bytes, its offsets span {offsets[1] - offsets[0]:,}"
        )
    return _Entry(dtype, shape, *offsets)


def _shown(name: str) -> str:
    return repr(shorten(name, 200))


def _sizes(value: Any) -> tuple[int, ...] | None:
    """A list of unsigned 64-bit integers (booleans and floats are none), or None."""
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < _U64 for item in value):
        return None
    return tuple(value)


def _prove_contiguous(entries: Mapping[str, _Entry], size: int) -> None:
    """Raises ValueError unless the tensors cover the `size` bytes of data without holes and overlaps."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            kind = "overlaps the one before it" if entry.start < end else "leaves a hole before it"
            raise ValueError(f"tensor {_shown(name)} {kind}: it begins at byte {entry.start:,}, expected {end:,}")
        end = entry.stop
    if end != size:
        raise ValueError(f"the tensors end at byte {end:,} of the data, the file at {size:,}")


@dataclass(frozen=True, slots=True)
class HeaderLayout:
    """The beginning of a file to write.

    data:    the length, the header and its padding; the data follow at byte `len(data)`, a multiple of 8.
    offsets: name → byte of the file at which the tensor begins, in the order of the file.
    size:    bytes of the whole file.
    """

    data: bytes
    offsets: Mapping[str, int]
    size: int


def lay_out_header(entries: Iterable[tuple[str, DType, tuple[int, ...]]]) -> HeaderLayout:
    """The header of a file with these tensors (name, dtype, shape in items), byte for byte as the library writes it.

    Wide dtypes come first, then names in order: with the header padded to 8 bytes every tensor is aligned. The
    metadata are `{"format": "pt"}`: transformers 4 refuses files without it.

    Raises ModelError for names that a header cannot hold, OutputError where the header would be too large.
    """
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for name, dtype, shape in sorted(entries, key=lambda entry: (-entry[1].rank, entry[0])):
        if name in header or not is_unicode(name) or _CONTROL.search(name):
            raise ModelError(f"{_shown(name)} cannot be a tensor's name in a safetensors file")
        starts[name] = end
        size = prod(shape) * dtype.itemsize
        counted = _in_elements(name, dtype, shape)
        header[name] = {"dtype": dtype.name, "shape": counted, "data_offsets": (end, end + size)}
        end += size
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER_SIZE:
        raise OutputError(
            f"{len(starts):,} tensors need a header of {len(text):,} bytes; {MAX_HEADER_SIZE:,} are allowed",
            hint="write more files: --max-shard-size 5GB",
        )
    data = struct.pack("<Q", len(text)) + text
    return HeaderLayout(data, {name: len(data) + start for name, start in starts.items()}, len(data) + end)


def _in_elements(name: str, dtype: DType, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape as a header counts it, from one that counts items."""
    if dtype.packed == 1:
        return shape
    if not shape:
        raise ModelError(f"{_shown(name)}: a safetensors file cannot hold a scalar of {dtype}")
    return (*shape[:-1], shape[-1] * dtype.packed)
