"""Persistent ids: how a pickle refers to its storages, and which of them the file really holds.

An id is `("storage", class, key, device, numel)`; the legacy stream adds a sixth element, `None` or `(view key,
offset, size)` in elements of the class (torch `serialization.py`, `_save` and `_legacy_save`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from unshard import dtypes
from unshard.dtypes import DType
from unshard.errors import FormatError
from unshard.formats.torch_file.records import Global, Opaque, Storage
from unshard.tensors import SourceFile

STORAGE_TYPES: dict[str, DType | None] = {
    "DoubleStorage": dtypes.F64,
    "FloatStorage": dtypes.F32,
    "HalfStorage": dtypes.F16,
    "BFloat16Storage": dtypes.BF16,
    "LongStorage": dtypes.I64,
    "IntStorage": dtypes.I32,
    "ShortStorage": dtypes.I16,
    "CharStorage": dtypes.I8,
    "ByteStorage": dtypes.U8,
    "BoolStorage": dtypes.BOOL,
    "ComplexFloatStorage": dtypes.C64,
    "UntypedStorage": None,
    "_UntypedStorage": None,
}
"""What torch calls its storages; an untyped one counts bytes."""

OTHER_ITEM_SIZES: dict[str, int] = {
    "ComplexDoubleStorage": 16,
    "QInt8Storage": 1,
    "QUInt8Storage": 1,
    "QInt32Storage": 4,
    "QUInt4x2Storage": 1,
    "QUInt2x4Storage": 1,
}
"""Storages of types that we do not hold, by the bytes of an item (to find what lies behind them)."""


class Location(Protocol):
    """Where a container keeps the bytes of its storages."""

    def find(self, key: str, nbytes: int, numel: int) -> int:
        """The absolute offset in the file. FormatError where not exactly `nbytes` bytes are kept under this key."""
        ...


class Storages:
    """Turns persistent ids into storages, each key once."""

    def __init__(self, file: SourceFile, location: Location) -> None:
        self._file = file
        self._location = location
        self._known: dict[str, tuple[str, int, Storage | Opaque]] = {}

    def load(self, reference: Any) -> Any:
        """A Storage; an Opaque for storages of types that we do not hold; a class, of old module references."""
        if not isinstance(reference, tuple) or not reference:
            raise FormatError("the pickle refers to something outside of it that is no storage")
        kind = _text(reference[0])
        if kind == "module" and len(reference) == 4 and isinstance(reference[1], Global):
            return reference[1]
        if kind != "storage" or len(reference) not in (5, 6):
            raise FormatError("the pickle refers to something outside of it that is no storage")
        cls, key, device, numel, *view = reference[1:]
        key = _text(key)
        if not isinstance(cls, Global) or key is None or _text(device) is None or type(numel) is not int or numel < 0:
            raise FormatError("the pickle refers to a storage in a way that torch never writes")
        storage = self._load_once(cls, key, numel)
        if view and view[0] is not None:
            return self._view(storage, *view[0])
        return storage

    def _load_once(self, cls: Global, key: str, numel: int) -> Storage | Opaque:
        known = self._known.get(key)
        if known is None:
            storage = self._open(cls, key, numel)
            self._known[key] = cls.name, numel, storage
            return storage
        if known[:2] != (cls.name, numel):
            raise FormatError(f"storage {key} is both a {known[0]} of {known[1]} and a {cls.name} of {numel} elements")
        return known[2]

    def _open(self, cls: Global, key: str, numel: int) -> Storage | Opaque:
        if cls.name in STORAGE_TYPES and _is_torch(cls):
            dtype = STORAGE_TYPES[cls.name]
            nbytes = numel * (dtype.itemsize if dtype else 1)
            return Storage(self._file, key, dtype, numel, self._location.find(key, nbytes, numel), nbytes)
        if cls.name in OTHER_ITEM_SIZES and _is_torch(cls):
            self._location.find(key, numel * OTHER_ITEM_SIZES[cls.name], numel)
            return Opaque(cls, (key, numel))
        raise FormatError(f"storage {key} is of a kind that we do not know: {cls.path}")

    def _view(self, storage: Storage | Opaque, key: Any, start: Any, numel: Any) -> Storage | Opaque:
        """A part of a storage, `start` and `numel` in its elements."""
        name = _text(key)
        if name is None or type(start) is not int or type(numel) is not int or min(start, numel) < 0:
            raise FormatError("the pickle refers to a view of a storage in a way that torch never writes")
        if isinstance(storage, Opaque):
            return storage
        end = start + numel
        if end > storage.numel:
            raise FormatError(f"storage {storage.key} has {storage.numel} elements, its view {name} ends at {end}")
        itemsize = storage.dtype.itemsize if storage.dtype else 1
        offset = storage.offset + start * itemsize
        return replace(storage, key=name, numel=numel, offset=offset, nbytes=numel * itemsize)


def _is_torch(cls: Global) -> bool:
    return cls.module == "torch" or cls.module.startswith("torch.")


def _text(value: Any) -> str | None:
    """A text, which Python 2 wrote as bytes."""
    if isinstance(value, bytes):
        return value.decode("ascii", "backslashreplace")
    return value if isinstance(value, str) else None
