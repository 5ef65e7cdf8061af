"""Copies: both ways give the same bytes, and each failure names the side that failed."""

from __future__ import annotations

import errno
import os
import tempfile
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


def copy_all(directory: Path, target: int, copier: Copier | None = None, *, aligned: bool = True) -> None:
    copier = copier or Copier(OpenFiles({"source": directory}))
    start = 4103 if aligned else 100
    copier.copy(FILE, 7, target, start, len(DATA) - 7)
    assert (directory / "out").read_bytes() == bytes(start) + DATA[7:]


def replace_kernel(monkeypatch: pytest.MonkeyPatch, act: Callable[..., int]) -> Calls:
    calls = Calls(act)
    monkeypatch.setattr(os, "copy_file_range", calls, raising=False)
    return calls


def test_the_kernel_copies_what_lies_alike_in_its_blocks(
    tmp_path: Path, target: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = replace_kernel(monkeypatch, os.copy_file_range)
    copy_all(tmp_path, target, aligned=True)
    assert calls.count > 0


def test_what_lies_otherwise_is_read_and_written(tmp_path: Path, target: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "major", lambda _: 8)
    calls = replace_kernel(monkeypatch, os.copy_file_range)
    copy_all(tmp_path, target, aligned=False)
    assert calls.count == 0


def test_filesystems_without_a_disk_of_their_own_are_always_asked(
    tmp_path: Path, target: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "major", lambda _: 0)
    calls = replace_kernel(monkeypatch, os.copy_file_range)
    copy_all(tmp_path, target, aligned=False)
    assert calls.count > 0


def test_from_disk_to_disk(tmp_path: Path, target: int, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Path("/dev/shm")
    if not os.access(other, os.W_OK) or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is only one filesystem here")
    calls = replace_kernel(monkeypatch, fail(errno.EXDEV))
    with tempfile.TemporaryDirectory(dir=other) as name:
        (Path(name) / "shard.bin").write_bytes(DATA)
        copy_all(
            tmp_path,
            target,
            Copier(
                OpenFiles({"source": Path(name)}),
            ),
        )
    assert calls.count == 0


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EIO])
def test_a_kernel_that_cannot(tmp_path: Path, target: int, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    calls = replace_kernel(monkeypatch, fail(number))
    copier = Copier(OpenFiles({"source": tmp_path}))
    for _ in range(3):
        copy_all(tmp_path, target, copier)
    assert calls.count == 1, "a way that fails is not tried again"


def test_a_kernel_that_has_no_such_call(tmp_path: Path, target: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "copy_file_range", raising=False)
    copy_all(tmp_path, target)


def test_short_copies(tmp_path: Path, target: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.copy_file_range
    calls = replace_kernel(monkeypatch, lambda source, out, size, at, to: real(source, out, min(size, 100_000), at, to))
    copy_all(tmp_path, target)
    assert calls.count == -(-(len(DATA) - 7) // 100_000)


def test_a_kernel_that_gives_up_in_the_middle(tmp_path: Path, target: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.copy_file_range
    calls = replace_kernel(
        monkeypatch, lambda source, out, size, at, to: real(source, out, 50_000, at, to) if calls.count == 1 else 0
    )
    copy_all(tmp_path, target)


@pytest.mark.parametrize("kernel", [True, False])
def test_a_truncated_source_is_named(
    tmp_path: Path, target: int, monkeypatch: pytest.MonkeyPatch, kernel: bool
) -> None:
    if not kernel:
        replace_kernel(monkeypatch, fail(errno.ENOSYS))
    os.truncate(tmp_path / "shard.bin", 1000)
    with pytest.raises(FormatError, match=r"shard\.bin: ends at byte 1,000, but bytes up to [0-9,]+ are") as info:
        Copier(OpenFiles({"source": tmp_path})).copy(FILE, 7, target, 7, len(DATA) - 7)
    assert info.value.hint


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_not_tried_again(
    tmp_path: Path, target: int, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    replace_kernel(monkeypatch, fail(number))
    monkeypatch.setattr(os, "pwrite", fail(errno.EIO))
    with pytest.raises(OSError, match=os.strerror(number)):
        copy_all(tmp_path, target)


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
