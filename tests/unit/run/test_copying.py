"""Copies: every way gives the same bytes, and each failure names the side that failed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from unshard.errors import FormatError
from unshard.files import OpenFiles
from unshard.run.copying import BUFFER, Copier, write_all
from unshard.tensors import SourceFile

FILE = SourceFile("source", "shard.bin")
DATA = os.urandom(BUFFER * 2 + 4321)


class Calls:
    """Counts calls, and does something else instead of the real one."""

    def __init__(self, act: Callable[..., int]) -> None:
        self.count = 0
        self.act = act

    def __call__(self, *arguments: int) -> int:
        self.count += 1
        return self.act(*arguments)


def fail(number: int) -> Callable[..., int]:
    def act(*_: int) -> int:
        raise OSError(number, os.strerror(number))

    return act


@pytest.fixture
def target(tmp_path: Path) -> int:
    (tmp_path / "shard.bin").write_bytes(DATA)
    return os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)


def copy_all(directory: Path, target: int, copier: Copier | None = None) -> None:
    copier = copier or Copier(OpenFiles({"source": directory}))
    copier.copy(FILE, 7, target, 100, len(DATA) - 7)
    assert (directory / "out").read_bytes() == bytes(100) + DATA[7:]


def without(monkeypatch: pytest.MonkeyPatch, *names: str, number: int = errno.ENOSYS) -> list[Calls]:
    calls = [Calls(fail(number)) for _ in names]
    for name, call in zip(names, calls, strict=True):
        monkeypatch.setattr(os, name, call, raising=False)
    return calls


def test_by_the_best_way_here(tmp_path: Path, target: int) -> None:
    copy_all(tmp_path, target)


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EIO])
def test_without_copy_file_range(tmp_path: Path, target: int, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    (call,) = without(monkeypatch, "copy_file_range", number=number)
    copier = Copier(OpenFiles({"source": tmp_path}))
    for _ in range(3):
        copy_all(tmp_path, target, copier)
    assert call.count == 1, "a way that fails is not tried again"


def test_without_sendfile_either(tmp_path: Path, target: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = without(monkeypatch, "copy_file_range", "sendfile", number=errno.EINVAL)
    copy_all(tmp_path, target)
    assert [call.count for call in calls] == [1, 1]


def test_where_copy_file_range_does_not_exist(tmp_path: Path, target: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "copy_file_range", raising=False)
    copy_all(tmp_path, target)


def test_short_copies(tmp_path: Path, target: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.copy_file_range
    short = Calls(lambda source, out, size, at, to: real(source, out, min(size, 100_000), at, to))
    monkeypatch.setattr(os, "copy_file_range", short)
    copy_all(tmp_path, target)
    assert short.count == -(-(len(DATA) - 7) // 100_000)


def test_a_way_that_gives_up_in_the_middle(tmp_path: Path, target: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.copy_file_range
    once = Calls(lambda source, out, size, at, to: real(source, out, 50_000, at, to) if once.count == 1 else 0)
    monkeypatch.setattr(os, "copy_file_range", once)
    without(monkeypatch, "sendfile")
    copy_all(tmp_path, target)


@pytest.mark.parametrize("kernel", [True, False])
def test_a_truncated_source_is_named(
    tmp_path: Path, target: int, monkeypatch: pytest.MonkeyPatch, kernel: bool
) -> None:
    if not kernel:
        without(monkeypatch, "copy_file_range", "sendfile")
    os.truncate(tmp_path / "shard.bin", 1000)
    with pytest.raises(FormatError, match=r"shard\.bin: ends at byte 1,000, but bytes up to [0-9,]+ are") as info:
        Copier(OpenFiles({"source": tmp_path})).copy(FILE, 7, target, 0, len(DATA) - 7)
    assert info.value.hint


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_not_tried_again(
    tmp_path: Path, target: int, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    without(monkeypatch, "copy_file_range", number=number)
    (other,) = without(monkeypatch, "sendfile")
    with pytest.raises(OSError, match=os.strerror(number)):
        copy_all(tmp_path, target)
    assert other.count == 0


def test_short_writes(tmp_path: Path, target: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda out, data, at: real(out, data[:70_000], at))
    write_all(target, 3, DATA)
    assert (tmp_path / "out").read_bytes() == bytes(3) + DATA


def test_a_write_that_writes_nothing_is_a_full_disk(target: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError) as info:
        write_all(target, 0, DATA)
    assert info.value.errno == errno.ENOSPC
