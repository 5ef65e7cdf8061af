"""One output file on its way to the disk."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from unshard.errors import OutputError
from unshard.run.copying import BUFFER, Copier, write_all
from unshard.target import Seal
from unshard.tensors import SourceFile

_WRITEBACK = 8 << 20
"""Bytes after which the kernel is asked to start writing: the disk then works while more is copied, and the fsync at
the end is short. Measured on ext4 with a virtual disk: the whole takes two thirds of the time."""


class Output:
    """A file that is written at `path` under a temporary name and will be known as `name`.

    Spans may be written in any order and from several threads. Every failure is an OutputError that names the file.
    """

    def __init__(self, path: Path, name: str, size: int) -> None:
        self._path, self._name, self._size = path, name, size
        self._lock = Lock()
        self._dirty = 0
        self._dirty_from, self._dirty_to = size, 0
        with self._failing():
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        with self._failing():
            os.ftruncate(self._descriptor, size)

    def write(self, offset: int, data: memoryview | bytes) -> None:
        """Write all of `data` at byte `offset`."""
        with self._failing():
            write_all(self._descriptor, offset, data)
        self._start_writeback(offset, len(data))

    def copy(self, copier: Copier, file: SourceFile, source_offset: int, offset: int, size: int) -> None:
        """Copy a span of a source file."""
        with self._failing():
            copier.copy(file, source_offset, self._descriptor, offset, size)
        self._start_writeback(offset, size)

    def seal(self, seal: Seal) -> None:
        """Write the checksum of bytes that have been written before."""
        checksum, offset, view = 0, seal.start, memoryview(bytearray(min(BUFFER, seal.stop - seal.start)))
        with self._failing():
            while offset < seal.stop:
                count = os.preadv(self._descriptor, [view[: seal.stop - offset]], offset)
                if count == 0:
                    raise OSError(errno.EIO, "it became shorter while it was written")
                checksum = zlib.crc32(view[:count], checksum)
                offset += count
            write_all(self._descriptor, seal.at, checksum.to_bytes(4, "little"))

    def finish(self) -> None:
        """Wait until the bytes are on the disk, and close."""
        with self._failing():
            os.fsync(self._descriptor)
        self.close()

    def close(self) -> None:
        """Close, whatever state the file is in."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _start_writeback(self, offset: int, size: int) -> None:
        """Note that a span is dirty, and when enough is, let the kernel start with it.

        POSIX_FADV_DONTNEED starts the writing of dirty pages and drops clean ones. Each span is given once, while all
        of it is dirty, so that it stays in memory for whoever reads the file next.
        """
        with self._lock:
            self._dirty += size
            self._dirty_from, self._dirty_to = min(self._dirty_from, offset), max(self._dirty_to, offset + size)
            if self._dirty < _WRITEBACK:
                return
            start, stop = self._dirty_from, self._dirty_to
            self._dirty, self._dirty_from, self._dirty_to = 0, self._size, 0
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(self._descriptor, start, stop - start, os.POSIX_FADV_DONTNEED)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise write_error(self._name, error) from error


def write_error(name: str, error: OSError) -> OutputError:
    """The error of an output that could not be written, with a hint where the reason is a common one."""
    hints = {
        errno.ENOSPC: "free some space, or choose an output on another disk, and rerun: nothing was left behind",
        errno.EDQUOT: "your quota is used up: free some space, or choose another disk, and rerun",
        errno.EFBIG: "the limit of file sizes is too low: see `ulimit -f`, or use a smaller --max-shard-size",
        errno.EACCES: "choose a directory that you may write to",
        errno.EPERM: "choose a directory that you may write to",
        errno.EROFS: "choose an output on a disk that is not mounted read-only",
    }
    return OutputError(f"{name}: cannot be written: {error.strerror}", hint=hints.get(error.errno or 0))
