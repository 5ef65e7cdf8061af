"""Moving a contiguous span from one file to another.

Two ways lead there. `copy_file_range` may share blocks instead of copying them (btrfs, XFS) and on network filesystems
may never leave the server; elsewhere it moves page by page. Plain reads and writes of half a MiB use larger pages, and
several threads of them do not get in each other's way in one file. Measured on ext4 (Linux 6.18, two cores) for spans
that are not aligned to blocks, as those of checkpoints hardly ever are: plain ones take half of the processor's time,
and two thirds of the wall time. So the kernel is asked where it may know better, and plain is what always works.
"""

from __future__ import annotations

import errno
import os

from unshard.files import OpenFiles
from unshard.tensors import SourceFile

BUFFER = 512 << 10
"""Bytes of one plain read or write. A read fits a core's second-level cache; larger is slower. A longer write makes the
kernel cache it in larger runs of pages, which are hard to find: under a hypervisor, where such runs are given back and
asked for again, writes of 1 MiB took three times as long as these every other time, and never less."""

_BLOCK = 4096
"""Bytes; filesystems share whole blocks."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of the target that no other way of writing mends."""


class Copier:
    """Copies spans for one thread, which owns its buffer."""

    def __init__(self, files: OpenFiles) -> None:
        self._files = files
        self._buffer: memoryview | None = None
        self._kernel_copies = hasattr(os, "copy_file_range")

    def copy(self, file: SourceFile, source_offset: int, target: int, target_offset: int, size: int) -> None:
        """Copy `size` bytes. Raises FormatError where the source fails or ends early, OSError where the target does."""
        done = 0
        if self._kernel_copies:
            with self._files.use(file) as source:
                if _kernel_may_know_better(source, source_offset, target, target_offset):
                    done = self._copy_in_kernel(source, source_offset, target, target_offset, size)
        self._read_and_write(file, source_offset + done, target, target_offset + done, size - done)

    def _copy_in_kernel(self, source: int, source_offset: int, target: int, target_offset: int, size: int) -> int:
        """Bytes copied: all of them, or fewer where the kernel cannot (EXDEV, EINVAL, ENOSYS, EOPNOTSUPP, …).

        An error other than a lack of room is left to plain reads and writes, which tell which side failed; the kernel
        is not asked again. Some filesystems answer 0 before the end.
        """
        done = 0
        try:
            while done < size:
                count = os.copy_file_range(source, target, size - done, source_offset + done, target_offset + done)
                if count == 0:
                    break
                done += count
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise
            self._kernel_copies = False
        return done

    def _read_and_write(self, file: SourceFile, source_offset: int, target: int, target_offset: int, size: int) -> None:
        if self._buffer is None:
            self._buffer = memoryview(bytearray(BUFFER))
        for done in range(0, size, BUFFER):
            part = self._buffer[: min(BUFFER, size - done)]
            self._files.read_into(file, source_offset + done, part)
            write_all(target, target_offset + done, part)


def _kernel_may_know_better(source: int, source_offset: int, target: int, target_offset: int) -> bool:
    """Whether both files lie on one filesystem that may share blocks of these spans, or that is its own master.

    Filesystems that are not on one block device (major number 0: NFS, CIFS, btrfs, overlays, FUSE) have ways of their
    own; on the others only spans that lie alike in their blocks can be shared.
    """
    device = os.fstat(target).st_dev
    if os.fstat(source).st_dev != device:
        return False
    return os.major(device) == 0 or (source_offset - target_offset) % _BLOCK == 0


def write_all(target: int, offset: int, data: memoryview | bytes) -> None:
    """Write all of `data` at byte `offset`. Raises OSError; ENOSPC where the kernel accepts nothing more."""
    view, done = memoryview(data), 0
    while done < len(view):
        count = os.pwrite(target, view[done : done + BUFFER], offset + done)
        if count == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += count
