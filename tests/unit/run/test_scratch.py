"""Encoded files: decoded once, read like others, in bounded room, and nothing left behind."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp_bytes import compress
from unshard.errors import FormatError, OutputError
from unshard.files import OpenFiles, Scratch, room_for, scratch
from unshard.tensors import Encoded, SourceFile

pytest.importorskip("zstandard")

SIZE = 300_000


def content(number: int) -> bytes:
    return (number.to_bytes(4, "little") * SIZE)[:SIZE]


def write(directory: Path, count: int) -> list[SourceFile]:
    """One file with items one behind the other."""
    files, data = [], b"?" * 11
    for number in range(count):
        item = compress(content(number))
        files.append(SourceFile("source", "items", Encoded("zstd", len(data), len(item), SIZE)))
        data += item
    (directory / "items").write_bytes(data)
    return files


def read(files: OpenFiles, file: SourceFile, offset: int = 0, size: int = SIZE) -> bytes:
    buffer = bytearray(size)
    files.read_into(file, offset, memoryview(buffer))
    return bytes(buffer)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The starts of the items that are decoded, in order."""
    starts: list[int] = []
    real = scratch.decode

    def decode(reader: object, start: int, length: int) -> Iterator[bytes]:
        starts.append(start)
        return real(reader, start, length)  # type: ignore[arg-type]

    monkeypatch.setattr(scratch, "decode", decode)
    return starts


def test_items_are_decoded_once_and_read_anywhere(tmp_path: Path, decoded: list[int]) -> None:
    items = write(tmp_path, 5)
    with OpenFiles({"source": tmp_path}) as files:
        for number in (3, 0, 4, 3, 1, 0):
            assert read(files, items[number]) == content(number)
            assert read(files, items[number], 1234, 99) == content(number)[1234:1333]
            assert read(files, items[number], SIZE, 0) == b""
    assert len(decoded) == 4


def test_plain_bytes_of_the_same_file_are_read_as_they_are(tmp_path: Path) -> None:
    (item,) = write(tmp_path, 1)
    with OpenFiles({"source": tmp_path}) as files:
        assert read(files, item, 0, 4) == content(0)[:4]
        assert read(files, SourceFile("source", "items"), 0, 11) == b"?" * 11


def test_threads_that_need_one_item_wait_for_the_one_that_decodes_it(tmp_path: Path, decoded: list[int]) -> None:
    items = write(tmp_path, 3)
    found: list[bytes] = []
    with OpenFiles({"source": tmp_path}) as files:

        def work() -> None:
            found.extend([read(files, item) for item in items])

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(found) == sorted([content(number) for number in range(3) for _ in range(8)])
    assert len(decoded) == 3


def test_what_was_not_used_for_longest_makes_room(
    tmp_path: Path, decoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "SEGMENT", 1)
    items = write(tmp_path, 4)
    with OpenFiles({"source": tmp_path}, scratch=Scratch(room=3 * SIZE)) as files:
        for number in (0, 1, 2, 0, 3, 0, 2, 1):
            assert read(files, items[number]) == content(number)
    order = [items.index(item) for start in decoded for item in items if item.encoded and item.encoded.start == start]
    assert order == [0, 1, 2, 3, 1]


def test_descriptors_stay_few(tmp_path: Path) -> None:
    items = write(tmp_path, 300)
    before = len(os.listdir("/dev/fd"))
    with OpenFiles({"source": tmp_path}, scratch=Scratch(room=10 * SIZE)) as files:
        for number, item in enumerate(items):
            assert read(files, item, 0, 4) == content(number)[:4]
            assert len(os.listdir("/dev/fd")) <= before + 4
    assert len(os.listdir("/dev/fd")) == before


def test_an_item_larger_than_the_room_is_read_all_the_same(tmp_path: Path) -> None:
    (item,) = write(tmp_path, 1)
    with OpenFiles({"source": tmp_path}, scratch=Scratch(room=10)) as files:
        assert read(files, item) == content(0)


def test_no_name_shows_while_items_are_decoded(tmp_path: Path) -> None:
    (item,) = write(tmp_path, 1)
    place = tmp_path / "scratch"
    place.mkdir()
    with OpenFiles({"source": tmp_path}, scratch=Scratch(place)) as files:
        assert read(files, item) == content(0)
        assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (SIZE + 1, f"decodes to {SIZE:,} bytes, fewer than the {SIZE + 1:,} that its first ones promise"),
        (SIZE - scratch.MOST_BEHIND - 1, "decodes to more than the"),
    ],
)
def test_another_size_than_promised_is_damage(tmp_path: Path, size: int, message: str) -> None:
    (item,) = write(tmp_path, 1)
    assert item.encoded is not None
    wrong = SourceFile("source", "items", Encoded("zstd", 11, item.encoded.length, size))
    with OpenFiles({"source": tmp_path}) as files:
        for _ in range(2):
            with pytest.raises(FormatError, match=message) as caught:
                read(files, wrong, 0, 1)
            assert "items: the item at byte 11: " in str(caught.value)


def test_a_bomb_is_left_at_its_first_byte_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = compress(bytes(100 << 20))
    (tmp_path / "items").write_bytes(bomb)
    written: list[int] = []
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: written.append(len(data)) or real(fd, data, at))
    file = SourceFile("source", "items", Encoded("zstd", 0, len(bomb), 1000))
    with OpenFiles({"source": tmp_path}) as files, pytest.raises(FormatError, match="decodes to more than the 1,000"):
        read(files, file, 0, 1)
    assert len(bomb) < 20_000
    assert sum(written) <= 1000 + scratch.MOST_BEHIND


def test_nothing_behind_the_promised_size_is_read(tmp_path: Path) -> None:
    (item,) = write(tmp_path, 1)
    with OpenFiles({"source": tmp_path}) as files, pytest.raises(FormatError, match=r"300,001 of 300,000 decoded ones"):
        read(files, item, 1, SIZE)


def test_a_full_disk_is_told_with_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwrite(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (item,) = write(tmp_path, 1)
    monkeypatch.setattr(os, "pwrite", pwrite)
    files = OpenFiles({"source": tmp_path}, scratch=Scratch(tmp_path))
    with files, pytest.raises(OutputError, match="cannot be decoded there: No space left on device") as caught:
        read(files, item)
    assert "TMPDIR" in str(caught.value.hint)


def test_a_directory_that_takes_no_files_is_told(tmp_path: Path) -> None:
    (item,) = write(tmp_path, 1)
    with OpenFiles({"source": tmp_path}, scratch=Scratch(tmp_path / "gone")) as files, pytest.raises(OutputError):
        read(files, item)


def test_a_file_that_was_cut_short_is_told(tmp_path: Path) -> None:
    *_, last = write(tmp_path, 3)
    os.truncate(tmp_path / "items", (tmp_path / "items").stat().st_size - 5)
    with OpenFiles({"source": tmp_path}) as files, pytest.raises(FormatError, match="ends at byte"):
        read(files, last)


def test_who_decodes_stops_when_told_to(tmp_path: Path) -> None:
    first, second = write(tmp_path, 2)
    with OpenFiles({"source": tmp_path}) as files:
        read(files, first)
        files.stop()
        with pytest.raises(scratch.StoppedError):
            read(files, second)


def file(name: str, size: int) -> SourceFile:
    return SourceFile("source", name, Encoded("zstd", 0, size, size))


def test_room_is_what_is_live_at_one_time_for_each_thread_and_one_more() -> None:
    a, b, c, d = file("a", 10), file("b", 20), file("c", 5), file("d", 1)
    assert room_for([], 4) == 0
    assert room_for([set(), {a}, set()], 4) == 10
    many = [{file(str(number), 10)} for number in range(100)]
    assert room_for(many, 2) == 30
    assert room_for([{a, b}, {c}, {d}, *many], 1) == 60
    assert room_for([{a}, *many, {a}], 1) == 40


def test_plain_files_take_no_room() -> None:
    assert room_for([{SourceFile("source", "a")}], 2) == 0
