"""The cache of open source files."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from unshard.errors import FormatError
from unshard.files import OpenFiles
from unshard.tensors import SourceFile


def make(directory: Path, count: int) -> list[SourceFile]:
    for number in range(count):
        (directory / f"rank_{number}").write_bytes(bytes([number]) * 8)
    return [SourceFile("source", f"rank_{number}") for number in range(count)]


def open_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def read(files: OpenFiles, file: SourceFile, offset: int = 0, size: int = 8) -> bytes:
    buffer = bytearray(size)
    files.read_into(file, offset, memoryview(buffer))
    return bytes(buffer)


def test_no_more_are_open_than_allowed(tmp_path: Path) -> None:
    before = open_descriptors()
    files = OpenFiles({"source": tmp_path}, most=3)
    for _ in range(2):
        for number, file in enumerate(make(tmp_path, 20)):
            assert read(files, file) == bytes([number]) * 8
            assert open_descriptors() <= before + 3
    files.close()
    assert open_descriptors() == before


def test_the_longest_unused_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = make(tmp_path, 3)
    opened: list[str] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: opened.append(Path(path).name) or real(path, *rest))
    files = OpenFiles({"source": tmp_path}, most=2)
    for file in (a, b, a, c, a, b):
        read(files, file)
    assert opened == ["rank_0", "rank_1", "rank_2", "rank_1"]
    files.close()


def test_a_file_in_use_stays_open(tmp_path: Path) -> None:
    a, b, c = make(tmp_path, 3)
    files = OpenFiles({"source": tmp_path}, most=1)
    with files.use(a) as descriptor:
        read(files, b)
        read(files, c)
        files.close()
        assert os.pread(descriptor, 8, 0) == bytes(8)
    files.close()


def test_the_limit_of_the_process_is_respected(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    names = make(tmp_path, 80)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_descriptors() + 40, hard))
        files = OpenFiles({"source": tmp_path})
        for file in names:
            read(files, file)
        files.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_when_descriptors_run_out_the_unused_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = make(tmp_path, 2)
    files = OpenFiles({"source": tmp_path}, most=100)
    read(files, a)
    real, failures = os.open, [errno.EMFILE]

    def scarce(path: str, *rest: int) -> int:
        if failures:
            raise OSError(failures.pop(), "too many")
        return real(path, *rest)

    before = open_descriptors()
    monkeypatch.setattr(os, "open", scarce)
    assert read(files, b) == b"\1" * 8
    assert open_descriptors() == before
    files.close()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"gone: cannot be opened: No such file"):
        read(OpenFiles({"source": tmp_path}), SourceFile("source", "gone"))


def test_a_short_file_is_named(tmp_path: Path) -> None:
    (file,) = make(tmp_path, 1)
    with pytest.raises(FormatError, match=r"rank_0: ends at byte 8, but bytes up to 12 are needed"):
        read(OpenFiles({"source": tmp_path}), file, 4)


def test_a_failing_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = make(tmp_path, 1)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(FormatError, match=r"rank_0: cannot be read at byte 4: Input/output error"):
        read(OpenFiles({"source": tmp_path}), file, 4, 4)
