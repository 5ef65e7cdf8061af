"""`pytorch_model.bin` without PyTorch: the zip archive that torch.save writes since 1.6.

Members are stored, never compressed, and every payload begins at a multiple of 64 bytes, so that torch can map it. The
CRC-32 of a payload is known only when its bytes are: it is sealed into the data descriptor behind them and into the
central directory. There is no `.format_version` member: with it, torch would compute the places of the storages from
the habits of its own writer instead of reading them. Records are those of PKWARE's APPNOTE.TXT, 4.3.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from zlib import crc32

from unshard.dtypes import DType
from unshard.errors import ModelError
from unshard.formats.huggingface.state_dict_pickle import pickle_state_dict
from unshard.formats.json_text import is_unicode
from unshard.target import Seal

_ALIGNMENT = 64
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_UTF8, _DESCRIPTOR = 1 << 11, 1 << 3
_VERSION, _VERSION_64 = 20, 45
_DATE = 0x21
"""1980-01-01, the first day of zip."""

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_EXTRA = struct.Struct("<HH")
_ZIP64_EXTRA, _PADDING_EXTRA = 0x0001, 0x4246
_CRC_IN_CENTRAL = 16


@dataclass(frozen=True, slots=True)
class ArchiveLayout:
    """A file to write: see `target.TargetFile`. `offsets` are those of the tensors, in the given order."""

    size: int
    literals: tuple[tuple[int, bytes], ...]
    offsets: Mapping[str, int]
    seals: tuple[Seal, ...]


def lay_out_archive(stem: str, entries: Sequence[tuple[str, DType, tuple[int, ...]]]) -> ArchiveLayout:
    """The archive of contiguous tensors (name, dtype, shape in items), in order, in the folder `stem`.

    Raises ModelError for names that are not valid Unicode.
    """
    import hashlib

    wrong = [name for name, _, _ in entries if not is_unicode(name)]
    if wrong:
        raise ModelError(f"{wrong[0]!r} cannot be a tensor's name in {stem}.bin")
    archive = _Archive(stem)
    pickled = pickle_state_dict(entries)
    archive.add("data.pkl", pickled)
    archive.add("byteorder", b"little")
    offsets: dict[str, int] = {}
    for number, (name, dtype, shape) in enumerate(entries):
        offsets[name] = archive.reserve(f"data/{number}", prod(shape) * dtype.itemsize)
    archive.add("version", b"3\n")
    digest = int.from_bytes(hashlib.sha256(pickled).digest(), "big")
    archive.add(".data/serialization_id", f"{digest % 10**40:040d}".encode("ascii"))
    archive.finish()
    literals = tuple([(start, bytes(data)) for start, data in archive.literals])
    return ArchiveLayout(archive.position, literals, offsets, tuple(archive.seals))


@dataclass(slots=True)
class _Member:
    """`crc` is None where the payload is still to come."""

    name: bytes
    header: int
    payload: int
    size: int
    crc: int | None

    @property
    def is_large(self) -> bool:
        return self.size >= _FULL32

    @property
    def flags(self) -> int:
        return _UTF8 | (_DESCRIPTOR if self.crc is None else 0)


@dataclass(slots=True)
class _Archive:
    """Grows from the front; `position` is the end so far."""

    folder: str
    position: int = 0
    literals: list[tuple[int, bytearray]] = field(default_factory=list)
    seals: list[Seal] = field(default_factory=list)
    members: list[_Member] = field(default_factory=list)

    def add(self, name: str, data: bytes) -> None:
        """A member whose bytes are known."""
        self._begin(name, len(data), crc32(data))
        self._write(data)

    def reserve(self, name: str, size: int) -> int:
        """Room for a member that is yet to be written, and the byte at which it begins."""
        member = self._begin(name, size, None if size else 0)
        self.position += size
        if size:
            self.seals.append(Seal(self.position + 4, member.payload, member.payload + size))
            self._write(struct.pack("<4s3Q" if member.is_large else "<4s3I", b"PK\x07\x08", 0, size, size))
        return member.payload

    def finish(self) -> None:
        """The central directory and its end records."""
        start = self.position
        for member in self.members:
            self._write_central(member)
        size, count, end = self.position - start, len(self.members), self.position
        if count >= _FULL16 or max(size, start) >= _FULL32:
            record = (_VERSION_64, _VERSION_64, 0, 0, count, count, size, start)
            self._write(_END_64.pack(b"PK\x06\x06", _END_64.size - 12, *record))
            self._write(_LOCATOR.pack(b"PK\x06\x07", 0, end, 1))
        shown = min(count, _FULL16)
        self._write(_END.pack(b"PK\x05\x06", 0, 0, shown, shown, min(size, _FULL32), min(start, _FULL32), 0))

    def _begin(self, name: str, size: int, crc: int | None) -> _Member:
        """A local header, padded with an `FB` extra field as torch pads it."""
        member = _Member(f"{self.folder}/{name}".encode(), self.position, 0, size, crc)
        extra = _zip64_extra(size, size) if member.is_large else b""
        end = self.position + _LOCAL.size + len(member.name) + len(extra) + _EXTRA.size
        padding = -end % _ALIGNMENT
        extra += _EXTRA.pack(_PADDING_EXTRA, padding) + b"Z" * padding
        version = _VERSION_64 if member.is_large else _VERSION
        known = 0 if crc is None and not member.is_large else min(size, _FULL32)
        sizes = (crc or 0, known, known, len(member.name), len(extra))
        self._write(_LOCAL.pack(b"PK\x03\x04", version, member.flags, 0, 0, _DATE, *sizes) + member.name + extra)
        member.payload = self.position
        self.members.append(member)
        return member

    def _write_central(self, member: _Member) -> None:
        if member.crc is None:
            self.seals.append(Seal(self.position + _CRC_IN_CENTRAL, member.payload, member.payload + member.size))
        wide = [member.size, member.size] if member.is_large else []
        wide += [member.header] if member.header >= _FULL32 else []
        extra = _zip64_extra(*wide) if wide else b""
        version = _VERSION_64 if wide else _VERSION
        shown = min(member.size, _FULL32)
        head = (
            version,
            version,
            member.flags,
            0,
            0,
            _DATE,
            member.crc or 0,
            shown,
            shown,
            len(member.name),
            len(extra),
        )
        place = (0, 0, 0, 0, min(member.header, _FULL32))
        self._write(_CENTRAL.pack(b"PK\x01\x02", *head, *place) + member.name + extra)

    def _write(self, data: bytes) -> None:
        """Literal bytes, joined to those just before them."""
        start, earlier = self.literals[-1] if self.literals else (-1, bytearray())
        if start + len(earlier) == self.position:
            earlier += data
        else:
            self.literals.append((self.position, bytearray(data)))
        self.position += len(data)


def _zip64_extra(*values: int) -> bytes:
    return _EXTRA.pack(_ZIP64_EXTRA, 8 * len(values)) + struct.pack(f"<{len(values)}Q", *values)
