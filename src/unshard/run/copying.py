"""Moving a contiguous span from one file to another, in the kernel where that is possible.

`copy_file_range` comes first: on one disk it moves or even shares pages, on network filesystems it may stay on the
server. Kernels and filesystems that cannot do it answer EXDEV, EINVAL, ENOSYS or EOPNOTSUPP (macOS has no such call),
and some answer 0 for files that are not at their end. Then comes `sendfile`, and at last plain reads and writes, which
work everywhere and tell which side failed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from threading import local

from unshard.files import OpenFiles
from unshard.tensors import SourceFile

BUFFER = 1 << 20
"""Bytes of one plain read: about a core's second-level cache; larger is slower."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of the target that no other way of writing mends."""

KernelCopy = Callable[[int, int, int, int, int], int]
"""(source descriptor, source offset, target descriptor, target offset, size) → bytes copied."""


def _copy_file_range(source: int, source_offset: int, target: int, target_offset: int, size: int) -> int:
    return os.copy_file_range(source, target, size, source_offset, target_offset)


def _sendfile(source: int, source_offset: int, target: int, target_offset: int, size: int) -> int:
    os.lseek(target, target_offset, os.SEEK_SET)
    return os.sendfile(target, source, source_offset, size)


class Copier:
    """Copies spans by the best way that works here. One that fails is not tried again.

    May be shared by threads, as long as no two copy to the same descriptor at once (`sendfile` moves its offset).
    """

    def __init__(self, files: OpenFiles) -> None:
        self._files = files
        self._ways: tuple[KernelCopy, ...] = (_sendfile,)
        if hasattr(os, "copy_file_range"):
            self._ways = (_copy_file_range, _sendfile)
        self._buffers = local()

    def copy(self, file: SourceFile, source_offset: int, target: int, target_offset: int, size: int) -> None:
        """Copy `size` bytes. Raises FormatError where the source fails or ends early, OSError where the target does."""
        done = 0
        with self._files.use(file) as source:
            for way in self._ways:
                try:
                    while done < size:
                        count = way(source, source_offset + done, target, target_offset + done, size - done)
                        if count == 0:
                            break
                        done += count
                except OSError as error:
                    if error.errno in _NO_ROOM:
                        raise
                    self._ways = tuple([other for other in self._ways if other is not way])
                if done == size:
                    return
        self._read_and_write(file, source_offset + done, target, target_offset + done, size - done)

    def _read_and_write(self, file: SourceFile, source_offset: int, target: int, target_offset: int, size: int) -> None:
        buffer = self._buffer()
        for done in range(0, size, len(buffer)):
            part = buffer[: min(len(buffer), size - done)]
            self._files.read_into(file, source_offset + done, part)
            write_all(target, target_offset + done, part)

    def _buffer(self) -> memoryview:
        if not hasattr(self._buffers, "view"):
            self._buffers.view = memoryview(bytearray(BUFFER))
        view: memoryview = self._buffers.view
        return view


def write_all(target: int, offset: int, data: memoryview | bytes) -> None:
    """Write all of `data` at byte `offset`. Raises OSError; ENOSPC where the kernel accepts nothing more."""
    view, done = memoryview(data), 0
    while done < len(view):
        count = os.pwrite(target, view[done:], offset + done)
        if count == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += count
