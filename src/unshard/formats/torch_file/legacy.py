"""The stream that torch wrote before 1.6 (and writes under `_use_new_zipfile_serialization=False`).

Five pickles in a row (magic number, protocol version, system information, the object, the sorted storage keys), then
per key its number of elements as a little-endian int64 and its bytes, without padding (torch `serialization.py`,
`_legacy_save`). Item sizes are those of the storage classes that the object names: so the object is read twice, first
to learn which storages there are, then with their places known.
"""

from __future__ import annotations

from struct import Struct
from typing import Any

from unshard.errors import FormatError
from unshard.formats.torch_file.builder import RecordBuilder
from unshard.formats.torch_file.limits import MIB, Limits
from unshard.formats.torch_file.machine import Budget, PickleEndsError
from unshard.formats.torch_file.refusals import AGAIN, refuse_byte_order
from unshard.formats.torch_file.slices import FileSlice
from unshard.formats.torch_file.storages import Location, Storages
from unshard.formats.torch_file.unpickler import unpickle
from unshard.tensors import SourceFile

MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001
COUNT = Struct("<q")
FIRST_READ = 1 * MIB


def is_legacy(head: bytes) -> bool:
    """Whether a file that begins so is a legacy stream: its first pickle, of any protocol, is the magic number."""
    if head[:1] not in (b"\x80", b"L"):
        return False
    limits = Limits(operations=8)
    budget = Budget(limits)
    try:
        value, _ = unpickle(head, RecordBuilder(Storages(SourceFile("", ""), Survey()), budget, limits), budget, limits)
    except FormatError:
        return False
    return type(value) is int and value == MAGIC


class Survey:
    """A location that answers 0 and notes how many bytes and elements each key has."""

    def __init__(self) -> None:
        self.sizes: dict[str, tuple[int, int]] = {}

    def find(self, key: str, nbytes: int, numel: int) -> int:
        self.sizes[key] = nbytes, numel
        return 0


class Places:
    """A location that knows where each storage lies."""

    def __init__(self, offsets: dict[str, int]) -> None:
        self._offsets = offsets

    def find(self, key: str, nbytes: int, numel: int) -> int:
        return self._offsets[key]


class LegacyStream:
    """Reads the pickles of one stream, in order."""

    def __init__(self, source: FileSlice, file: SourceFile, limits: Limits) -> None:
        self._source = source
        self._file = file
        self._limits = limits

    def read(self) -> tuple[Any, frozenset[str]]:
        """The object and the globals that it names. FormatError where the stream is damaged."""
        position = self._read_header()
        survey = Survey()
        _, _, end = self._unpickle(position, survey)
        keys, _, end = self._unpickle(end, survey)
        places = self._place(keys, survey, end)
        root, seen, _ = self._unpickle(position, places)
        return root, seen

    def _read_header(self) -> int:
        _, _, position = self._unpickle(0, Survey())
        protocol, _, position = self._unpickle(position, Survey())
        system, _, position = self._unpickle(position, Survey())
        if type(protocol) is not int or protocol != PROTOCOL:
            raise FormatError(f"torch's legacy stream, but not of the only known version, {PROTOCOL}")
        if not isinstance(system, dict) or system.get("little_endian") is not True:
            raise refuse_byte_order()
        return position

    def _unpickle(self, start: int, location: Location) -> tuple[Any, frozenset[str], int]:
        """One pickle at `start`: how long it is shows only at its end, so the piece read grows until it fits."""
        size = FIRST_READ
        while True:
            data = self._source.read_at_most(start, min(size, self._limits.pickle_bytes))
            budget = Budget(self._limits)
            builder = RecordBuilder(Storages(self._file, location), budget, self._limits)
            try:
                value, end = unpickle(data, builder, budget, self._limits)
            except PickleEndsError as error:
                if len(data) < size or start + len(data) >= self._source.size:
                    raise FormatError(f"not a complete file: {error.message}", hint=AGAIN) from None
                size *= 8
            else:
                return value, builder.globals, start + end

    def _place(self, keys: Any, survey: Survey, position: int) -> Places:
        """Where each storage lies: they follow each other from `position` to the end of the file."""
        if not _is_list_of_text(keys) or sorted(keys) != sorted(survey.sizes):
            raise FormatError("the storages that the file lists are not those that its object uses")
        offsets: dict[str, int] = {}
        for key in keys:
            nbytes, numel = survey.sizes[key]
            if position + COUNT.size + nbytes > self._source.size:
                raise FormatError(f"not a complete file: it ends before or inside storage {key}", hint=AGAIN)
            (count,) = COUNT.unpack(self._source.read(position, COUNT.size))
            if count != numel:
                raise FormatError(f"storage {key} has {count} elements in the file, but {numel} in its pickle")
            position += COUNT.size
            offsets[key] = self._source.start + position
            position += nbytes
        if position != self._source.size:
            raise FormatError(f"{self._source.size - position} bytes follow the last storage")
        return Places(offsets)


def _is_list_of_text(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
