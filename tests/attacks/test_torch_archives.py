"""Zip archives that lie: each gets its error, none is read in two ways, nothing is written outside of anything."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import torch_bytes as tb
from audit import watched
from unshard.errors import FormatError
from unshard.formats.torch_file import Limits, read_torch_file

PAYLOAD = 2
"""The index of `data/0` among the members."""
OTHER_MODEL = tb.finish(tb.mapping({"weight": tb.tensor(tb.storage(), (3, 2), (2, 1))}))


def lie(**claims: object) -> Callable[[], bytes]:
    """An archive whose storage claims these things."""

    def build() -> bytes:
        members = tb.torch_members()
        for name, value in claims.items():
            setattr(members[PAYLOAD], name, value)
        return tb.archive(members)

    return build


def twice(*indices: int) -> bytes:
    members = tb.torch_members()
    return tb.archive(members + [tb.torch_members(OTHER_MODEL)[index] for index in indices])


def end_record(**changes: int) -> bytes:
    """An archive whose end record is changed in one field."""
    fields = ["signature", "disk", "directory_disk", "disk_count", "count", "size", "offset", "comment"]
    data = tb.archive(tb.torch_members())
    values = dict(zip(fields, struct.unpack("<4s4H2LH", data[-22:]), strict=True))
    for name, change in changes.items():
        values[name] += change
    return data[:-22] + struct.pack("<4s4H2LH", *values.values())


def two_directories() -> bytes:
    """A second, hidden archive in the comment of the first: which one is read must not depend on the reader."""
    return tb.archive(tb.torch_members(), comment=tb.archive(tb.torch_members(OTHER_MODEL)))


def zip64_claims(count: int = 4, position: int = 0) -> bytes:
    data = bytearray(tb.archive(tb.torch_members(), zip64=True))
    record = len(data) - 22 - 20 - 56
    data[record + 24 : record + 40] = struct.pack("<2Q", count, count)
    if position:
        data[record + 56 + 8 : record + 56 + 16] = struct.pack("<Q", position)
    return bytes(data)


WHOLE = tb.archive(tb.torch_members())
NAME_AT = WHOLE.index(b"archive/data/0")
EXTRA_TOO_LONG = WHOLE[: NAME_AT - 2] + b"\xff\xff" + WHOLE[NAME_AT:]
SECOND_HEADER_DAMAGED = WHOLE[: NAME_AT - 30] + b"PK\x03\x05" + WHOLE[NAME_AT - 26 :]

ATTACKS: dict[str, tuple[bytes, str]] = {
    "two pickles of one name": (twice(0), "two members named archive/data.pkl"),
    "two storages of one name": (twice(PAYLOAD), "two members named archive/data/0"),
    "two folders": (
        tb.archive(tb.torch_members() + tb.torch_members(OTHER_MODEL, folder="other")),
        "2 members named data.pkl",
    ),
    "size larger in the directory": (lie(listed_size=25)(), r"storage 0 has 25 bytes in the archive, but 24"),
    "size smaller in the directory": (lie(listed_size=23)(), r"storage 0 has 23 bytes in the archive, but 24"),
    "size beyond the file": (lie(listed_size=1 << 31)(), "lies outside the archive or overlaps"),
    "size that the local header contradicts": (lie(local_size=23)(), "23 bytes by its own header and 24 by the dir"),
    "no sizes and no descriptor": (lie(flags=0x800)(), "0 bytes by its own header and 24 by the directory"),
    "other name in the local header": (lie(local_name="archive/data/1")(), "describe archive/data/0 differently"),
    "shorter name in the local header": (lie(local_name="archive/data/")(), "describe archive/data/0 differently"),
    "other method in the local header": (lie(local_method=8)(), "describe archive/data/0 differently"),
    "deflated in the directory only": (lie(local_method=0, method=8)(), "storage 0 is compressed"),
    "encrypted": (lie(flags=0x0809)(), "archive/data/0 is encrypted"),
    "offset of another member": (lie(listed_offset=0)(), "overlaps"),
    "offset inside another member": (lie(listed_offset=100)(), "overlaps"),
    "offset in the directory": (lie(listed_offset=len(WHOLE) - 60)(), "lies outside"),
    "offset beyond the file": (lie(listed_offset=1 << 31)(), "lies outside"),
    "extra that swallows what follows": (EXTRA_TOO_LONG, "runs into what follows"),
    "zip64 sizes that are missing": (lie(listed_size=0xFFFFFFFF)(), "lacks the 64-bit sizes"),
    "zip64 sizes that are huge": (
        lie(listed_size=0xFFFFFFFF, extra=struct.pack("<HHQQ", 1, 16, 1 << 62, 1 << 62))(),
        "lies outside the archive",
    ),
    "zip64 sizes cut short": (
        lie(listed_size=0xFFFFFFFF, extra=struct.pack("<HHQ", 1, 16, 24))(),
        "lies outside the archive|two sizes differ",
    ),
    "zip64 end record elsewhere": (zip64_claims(position=4), "zip64 end record is damaged"),
    "zip64 end record beyond the file": (zip64_claims(position=1 << 60), "were expected, but there are only"),
    "zip64 count": (zip64_claims(count=5), "lists 4 members; its end record says 5"),
    "count": (end_record(disk_count=1, count=1), "lists 4 members; its end record says 5"),
    "several disks": (end_record(disk=1), "one part of several"),
    "count on this disk": (end_record(count=1), "one part of several"),
    "directory offset": (end_record(offset=-4), "does not lie where its end record says"),
    "directory size": (end_record(size=-4), "does not lie where its end record says"),
    "comment that is not there": (end_record(comment=7), "not a complete file"),
    "bytes before the archive": (b"PK\x03\x04" + WHOLE, "does not lie where its end record says"),
    "another archive before it": (WHOLE + WHOLE, "does not lie where its end record says"),
    "bytes after the archive": (WHOLE + b"x", "not a complete file"),
    "bytes between members and directory": (tb.archive(tb.torch_members(), directory_shift=9), "does not lie where"),
    "damaged directory": (WHOLE.replace(b"PK\x01\x02", b"PK\x01\x03", 2), "directory is damaged"),
    "damaged local header": (SECOND_HEADER_DAMAGED, "no member lies where the directory places"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_each_lie_gets_its_error(tmp_path: Path, name: str) -> None:
    data, reason = ATTACKS[name]
    path = tmp_path / "model.pt"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=reason), watched(path):
        read_torch_file(path, tb.FILE)


def test_control_the_archive_itself_is_sound(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(WHOLE)
    with zipfile.ZipFile(path) as opened:
        assert opened.testzip() is None
    assert tb.weight(read_torch_file(path, tb.FILE).root).shape == (2, 3)


def test_the_last_archive_is_the_one_that_counts(tmp_path: Path) -> None:
    """An archive in the comment of another ends the file: its directory does not lie where it says."""
    with pytest.raises(FormatError, match="does not lie where its end record says"):
        tb.read(tmp_path, two_directories())


def test_comment_is_harmless(tmp_path: Path) -> None:
    data = tb.archive(tb.torch_members(), comment=b"PK\x05\x06 a comment" * 40)
    assert tb.weight(tb.read(tmp_path, data).root).shape == (2, 3)


@pytest.mark.parametrize("folder", ["../../etc", "/etc", "C:\\windows", "..", "\0"])
def test_folder_names_are_never_paths(tmp_path: Path, folder: str) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(tb.archive(tb.torch_members(folder=folder)))
    with watched(path):
        assert tb.weight(read_torch_file(path, tb.FILE).root).shape == (2, 3)
    assert list(tmp_path.iterdir()) == [path]


class TestBombs:
    def test_pickle_that_inflates_beyond_the_limit(self, tmp_path: Path) -> None:
        members = tb.torch_members(b"\0" * (Limits().pickle_bytes + 1))
        members[0].method = 8
        with pytest.raises(FormatError, match="134217729 bytes; at most 134217728 are read"):
            tb.read(tmp_path, tb.archive(members))

    @pytest.mark.parametrize("claimed", [100, 20_000_000])
    def test_pickle_that_inflates_to_other_than_it_claims(self, tmp_path: Path, claimed: int) -> None:
        members = tb.torch_members(b"\0" * 10_000_000)
        members[0].method = 8
        members[0].listed_size = claimed
        with pytest.raises(FormatError, match=f"does not inflate to the {claimed} bytes"):
            tb.read(tmp_path, tb.archive(members))

    def test_pickle_that_cannot_be_inflated(self, tmp_path: Path) -> None:
        members = tb.torch_members()
        members[0].method = 8
        data = bytearray(tb.archive(members))
        start = data.index(members[0].packed)
        data[start : start + 8] = b"\xff" * 8
        with pytest.raises(FormatError, match="cannot be inflated"):
            tb.read(tmp_path, bytes(data))

    def test_pickle_by_an_unknown_method(self, tmp_path: Path) -> None:
        members = tb.torch_members()
        members[0].method = 12
        with pytest.raises(FormatError, match="method 12, which we do not know"):
            tb.read(tmp_path, tb.archive(members))

    def test_directory_beyond_the_limit(self, tmp_path: Path) -> None:
        path = tmp_path / "model.pt"
        path.write_bytes(tb.archive([tb.Entry(f"archive/data/{number}", b"") for number in range(300)]))
        with pytest.raises(FormatError, match=r"directory has \d+ bytes; at most 9999 are read"):
            read_torch_file(path, tb.FILE, limits=Limits(directory_bytes=9999))
