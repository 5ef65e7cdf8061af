"""Positioned reads from a file or from an item inside one. Nothing is mapped into memory."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unshard.errors import FormatError


class FileSlice:
    """`size` bytes of an open file from byte `start` on. Offsets given to `read` count from `start`."""

    __slots__ = ("_descriptor", "size", "start")

    def __init__(self, descriptor: int, start: int, size: int) -> None:
        self._descriptor = descriptor
        self.start = start
        self.size = size

    def read(self, offset: int, count: int) -> bytes:
        """Exactly `count` bytes; FormatError where they are not all there."""
        if offset < 0 or count < 0 or offset + count > self.size:
            raise FormatError(f"bytes {offset} to {offset + count} were expected, but there are only {self.size}")
        position = self.start + offset
        data = os.pread(self._descriptor, count, position)
        if len(data) == count:
            return data
        return self._read_on(data, position, count)

    def read_at_most(self, offset: int, count: int) -> bytes:
        """`count` bytes, or what is left of the slice."""
        return self.read(offset, max(0, min(count, self.size - offset)))

    def _read_on(self, data: bytes, position: int, count: int) -> bytes:
        pieces = [data]
        done = len(data)
        while done < count:
            piece = os.pread(self._descriptor, count - done, position + done)
            if not piece:
                raise FormatError("the file became shorter while it was read")
            pieces.append(piece)
            done += len(piece)
        return b"".join(pieces)


@contextmanager
def open_slice(path: Path, start: int = 0, length: int | None = None) -> Iterator[FileSlice]:
    """Open `length` bytes of a regular file from byte `start` on (default: all of it).

    FormatError where the file cannot be opened or is shorter than that.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise FormatError("not a regular file")
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        raise FormatError(f"cannot be read: {error.strerror or error}") from error
    try:
        size = os.fstat(descriptor).st_size
        end = size if length is None else start + length
        if not 0 <= start <= end <= size:
            raise FormatError(f"the item lies at bytes {start} to {end}, but the file has only {size}")
        _expect_scattered_reads(descriptor)
        yield FileSlice(descriptor, start, end - start)
    except OSError as error:
        raise FormatError(f"cannot be read: {error.strerror or error}") from error
    finally:
        os.close(descriptor)


def _expect_scattered_reads(descriptor: int) -> None:
    """Spare the reading ahead: hundreds of small headers lie far apart between payload that nobody wants yet."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
