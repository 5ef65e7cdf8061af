"""Reads a file of torch.save, or an item of that kind inside a larger file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from unshard.errors import FormatError
from unshard.formats.torch_file.archive import read_archive
from unshard.formats.torch_file.builder import RecordBuilder
from unshard.formats.torch_file.legacy import LegacyStream, is_legacy
from unshard.formats.torch_file.limits import DEFAULT_LIMITS, Limits
from unshard.formats.torch_file.machine import Budget
from unshard.formats.torch_file.refusals import CHANGED, HEAD_SIZE, refuse
from unshard.formats.torch_file.slices import FileSlice, open_slice
from unshard.formats.torch_file.storages import Storages
from unshard.formats.torch_file.unpickler import unpickle
from unshard.formats.torch_file.zip_file import TorchZip
from unshard.tensors import SourceFile


@dataclass(frozen=True, slots=True, eq=False)
class TorchFile:
    """What a file of torch.save holds.

    root:      the saved object: dicts, lists, tuples, numbers, text, bytes and the records of `records.py`. It may be
               nested deeper than Python's recursion, and may contain itself.
    container: how it was kept, a zip archive or the legacy stream.
    globals:   the classes and functions that the pickle names, as `module.name`.
    saved_as:  the name, without its ending, of the file that torch.save wrote: it calls the archive's folder by it.
               "archive" where it wrote into an open file, and "" where it kept no name.
    """

    root: Any = field(repr=False)
    container: Literal["zip", "legacy"]
    globals: frozenset[str]
    saved_as: str = ""


def read_torch_file(
    path: Path, file: SourceFile, *, start: int = 0, length: int | None = None, limits: Limits = DEFAULT_LIMITS
) -> TorchFile:
    """Read the directory and the pickle of a torch file; the payload stays on disk.

    path, file: the same file, as a path to open and as the name that storages and errors carry.
    start, length: the bytes of the file that hold the item (default: all of it). Offsets in `Storage` are absolute in
    the file. FormatError, which names the file, where it is damaged, hostile, or no torch file.
    """
    try:
        with open_slice(path, start, length) as source:
            return read_slice(source, file, limits)
    except FormatError as error:
        place = f"{file}" if length is None else f"{file} (bytes {start} to {start + length})"
        raise FormatError(f"{place}: {error.message}", hint=error.hint) from error.__cause__


def read_slice(source: FileSlice, file: SourceFile, limits: Limits) -> TorchFile:
    """The same for an open file or item. Errors do not name it; offsets in `Storage` are absolute in the open file."""
    head = source.read_at_most(0, HEAD_SIZE)
    try:
        if head.startswith(b"PK\x03\x04"):
            return _read_zip(source, file, limits)
        if is_legacy(head):
            root, seen = LegacyStream(source, file, limits).read()
            return TorchFile(root, "legacy", seen)
    except FormatError as error:
        raise FormatError(error.message, hint=error.hint or CHANGED) from error.__cause__
    raise refuse(source, head)


def _read_zip(source: FileSlice, file: SourceFile, limits: Limits) -> TorchFile:
    archive = TorchZip(read_archive(source, limits))
    data = archive.read_pickle(limits.pickle_bytes)
    budget = Budget(limits)
    builder = RecordBuilder(Storages(file, archive), budget, limits)
    root, end = unpickle(data, builder, budget, limits)
    if end != len(data):
        raise FormatError(f"{len(data) - end} bytes follow the end of the pickle")
    return TorchFile(root, "zip", builder.globals, archive.folder.decode(errors="replace").rstrip("/"))
