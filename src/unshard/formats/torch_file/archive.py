"""The zip archives that torch.save writes: the directory, and where a member's payload lies.

Layout: APPNOTE.TXT 6.3 (EOCD 4.3.16, zip64 4.3.14 and 4.3.15, directory 4.3.12, local header 4.3.7). Torch stores all
members, aligns each payload by an extra field that stands in the local header only, and leaves the sizes in the local
header at zero (data descriptor): so sizes come from the directory, payload offsets from the local header, and the two
must agree in all else. This reader is strict where zip is lax: nothing before, between or over the members that a
second reader could see otherwise.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

from unshard.errors import FormatError
from unshard.formats.torch_file.limits import Limits
from unshard.formats.torch_file.refusals import AGAIN
from unshard.formats.torch_file.slices import FileSlice

END = Struct("<4s4H2LH")
END64_LOCATOR = Struct("<4sLQL")
END64 = Struct("<4sQ2H2L4Q")
ENTRY = Struct("<4s6H3L5H2L")
LOCAL = Struct("<4s5H3L2H")
EXTRA = Struct("<HH")
SIZE64 = Struct("<Q")

STORED, DEFLATED = 0, 8
ENCRYPTED, SIZES_FOLLOW = 1, 8
FULL16, FULL32 = 0xFFFF, 0xFFFFFFFF
ZIP64_EXTRA = 1
LONGEST_COMMENT = 0xFFFF


class Member(NamedTuple):
    """One entry of the directory. `offset` is that of the local header, `packed_size` and `size` are in bytes.

    `checksum` is the CRC-32 of the content, or 0 where torch was told not to compute any (`set_crc32_options`).
    """

    name: bytes
    flags: int
    method: int
    packed_size: int
    size: int
    offset: int
    checksum: int

    def __str__(self) -> str:
        return self.name.decode("utf-8", "backslashreplace")


@dataclass(frozen=True, slots=True)
class Archive:
    """An open archive. `ends` holds, per member, the byte before which its payload must end."""

    source: FileSlice
    members: Mapping[bytes, Member]
    ends: Mapping[bytes, int]

    def locate(self, name: bytes) -> int:
        """The offset in the slice at which the payload of a member begins."""
        member = self.members[name]
        header_size = LOCAL.size + len(name)
        header = self.source.read(member.offset, header_size)
        signature, _, flags, method, _, _, _, packed, size, name_size, extra_size = LOCAL.unpack_from(header)
        if signature != b"PK\x03\x04":
            raise FormatError(f"no member lies where the directory places {member}")
        if name_size != len(name) or header[LOCAL.size :] != name or method != member.method:
            raise FormatError(f"the directory and the file itself describe {member} differently")
        _check_local_sizes(member, flags, packed, size)
        payload: int = member.offset + header_size + extra_size
        if payload + member.packed_size > self.ends[name]:
            raise FormatError(f"{member} runs into what follows it")
        return payload

    def read(self, name: bytes, limit: int) -> bytes:
        """The content of a member of at most `limit` bytes; deflated ones are inflated."""
        member = self.members[name]
        if member.size > limit or member.packed_size > limit:
            raise FormatError(f"{member} has {member.size} bytes; at most {limit} are read")
        packed = self.source.read(self.locate(name), member.packed_size)
        if member.method == STORED:
            return packed
        if member.method != DEFLATED:
            raise FormatError(f"{member} is compressed by method {member.method}, which we do not know")
        return _inflate(member, packed)


def read_archive(source: FileSlice, limits: Limits) -> Archive:
    """Read the directory of a zip. FormatError where it is damaged, ambiguous or too large."""
    count, size, offset = _find_directory(source)
    if size > limits.directory_bytes:
        raise FormatError(f"the archive's directory has {size} bytes; at most {limits.directory_bytes} are read")
    members = _parse_directory(source.read(offset, size), count)
    return Archive(source, members, _find_ends(members, offset))


def _find_directory(source: FileSlice) -> tuple[int, int, int]:
    """Number of members, size and offset of the directory."""
    position, end = _find_end(source)
    _, disk, directory_disk, disk_count, count, size, offset, _ = END.unpack(end)
    start = position
    locator_at = position - END64_LOCATOR.size
    if locator_at >= 0:
        locator = source.read(locator_at, END64_LOCATOR.size)
        if locator.startswith(b"PK\x06\x07"):
            start = END64_LOCATOR.unpack(locator)[2]
            disk, directory_disk, disk_count, count, size, offset = _read_end64(source, start, locator_at)
    if disk or directory_disk or disk_count != count:
        raise FormatError("the archive is one part of several")
    if offset + size != start:
        raise FormatError(
            "the archive's directory does not lie where its end record says; bytes were added or are lost"
        )
    return count, size, offset


def _find_end(source: FileSlice) -> tuple[int, bytes]:
    """Offset and content of the end record: the last one whose comment reaches to the end of the file."""
    if source.size >= END.size:
        position = source.size - END.size
        end = source.read(position, END.size)
        if end.startswith(b"PK\x05\x06") and end.endswith(b"\0\0"):
            return position, end
    start = max(0, source.size - END.size - LONGEST_COMMENT)
    tail = source.read(start, source.size - start)
    found = tail.rfind(b"PK\x05\x06")
    while found >= 0:
        end = tail[found : found + END.size]
        if len(end) == END.size and found + END.size + END.unpack(end)[-1] == len(tail):
            return start + found, end
        found = tail.rfind(b"PK\x05\x06", 0, found)
    raise FormatError(
        "not a complete file: the archive's directory at its end is missing",
        hint=AGAIN,
    )


def _read_end64(source: FileSlice, start: int, locator_at: int) -> tuple[int, int, int, int, int, int]:
    record = source.read(start, END64.size)
    signature, record_size, _, _, disk, directory_disk, disk_count, count, size, offset = END64.unpack(record)
    if signature != b"PK\x06\x06" or start + 12 + record_size != locator_at:
        raise FormatError("the archive's zip64 end record is damaged")
    return disk, directory_disk, disk_count, count, size, offset


def _parse_directory(data: bytes, count: int) -> dict[bytes, Member]:
    members: dict[bytes, Member] = {}
    position = 0
    total = len(data)
    while position < total:
        if position + ENTRY.size > total:
            raise FormatError("the archive's directory is damaged")
        (
            signature,
            _,
            _,
            flags,
            method,
            _,
            _,
            checksum,
            packed,
            size,
            name_size,
            extra_size,
            comment_size,
            disk,
            _,
            _,
            offset,
        ) = ENTRY.unpack_from(data, position)
        name_at = position + ENTRY.size
        extra_at = name_at + name_size
        position = extra_at + extra_size + comment_size
        if signature != b"PK\x01\x02" or position > total or disk not in (0, FULL16):
            raise FormatError("the archive's directory is damaged")
        if size == FULL32 or packed == FULL32 or offset == FULL32:
            size, packed, offset = _widen(data[extra_at : extra_at + extra_size], size, packed, offset)
        member = Member(data[name_at:extra_at], flags, method, packed, size, offset, checksum)
        if member.name in members:
            raise FormatError(f"the archive has two members named {member}")
        if method == STORED and packed != size:
            raise FormatError(f"{member} is stored, but its two sizes differ: {packed} and {size}")
        if flags & ENCRYPTED:
            raise FormatError(f"{member} is encrypted")
        members[member.name] = member
    if len(members) != count:
        raise FormatError(f"the archive's directory lists {len(members)} members; its end record says {count}")
    return members


def _widen(extra: bytes, size: int, packed: int, offset: int) -> tuple[int, int, int]:
    """The 64-bit values of those fields that are full, in the order in which zip64 keeps them."""
    position = 0
    while position + EXTRA.size <= len(extra):
        kind, length = EXTRA.unpack_from(extra, position)
        position += EXTRA.size
        if kind == ZIP64_EXTRA:
            usable = min(length, len(extra) - position) // SIZE64.size * SIZE64.size
            wide = SIZE64.iter_unpack(extra[position : position + usable])
            narrow = (size, packed, offset)
            values = [next(wide, (FULL32,))[0] if value == FULL32 else value for value in narrow]
            return values[0], values[1], values[2]
        position += length
    raise FormatError("the archive's directory lacks the 64-bit sizes that it announces")


def _find_ends(members: Mapping[bytes, Member], directory: int) -> dict[bytes, int]:
    """Where each member must end: at the next one, or at the directory. Refuses members that overlap."""
    ends: dict[bytes, int] = {}
    end = directory
    for member in sorted(members.values(), key=lambda member: member.offset, reverse=True):
        if member.offset + LOCAL.size + len(member.name) + member.packed_size > end:
            raise FormatError(f"{member} lies outside the archive or overlaps another member")
        ends[member.name] = end
        end = member.offset
    return ends


def _check_local_sizes(member: Member, flags: int, packed: int, size: int) -> None:
    """The local sizes are those of the directory, or unknown yet: zero before a data descriptor, full under zip64."""
    unknown = (0, FULL32) if flags & SIZES_FOLLOW else (FULL32,)
    for local, listed in ((packed, member.packed_size), (size, member.size)):
        if local != listed and local not in unknown:
            raise FormatError(f"{member} has {local} bytes by its own header and {listed} by the directory")


def _inflate(member: Member, packed: bytes) -> bytes:
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        data = inflater.decompress(packed, member.size + 1)
    except zlib.error as error:
        raise FormatError(f"{member} cannot be inflated: {error}") from error
    if len(data) != member.size:
        raise FormatError(f"{member} does not inflate to the {member.size} bytes that the directory lists")
    return data
