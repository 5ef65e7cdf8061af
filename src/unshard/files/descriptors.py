"""Source files, opened once, kept open as long as there is room, and read by plain `pread`."""

from __future__ import annotations

import errno
import os
import resource
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from unshard.errors import FormatError
from unshard.files.room import Scratch
from unshard.tensors import SourceFile

if TYPE_CHECKING:
    from unshard.files.scratch import DecodedFiles

MOST_OPEN = 512
"""A cluster's checkpoint has thousands of files; a process may often open 1024, and needs some for itself."""


@dataclass(slots=True)
class _Entry:
    descriptor: int
    users: int = 0


class OpenFiles:
    """A bounded cache of descriptors of files under named roots. May be shared by threads.

    `scratch` is where encoded files are decoded, if any is read.
    """

    def __init__(self, roots: Mapping[str, Path], most: int | None = None, scratch: Scratch | None = None) -> None:
        self._roots, self._scratch = roots, scratch
        self._decoded: DecodedFiles | None = None
        self._most = most if most is not None else min(MOST_OPEN, _descriptor_limit() // 2)
        self._entries: OrderedDict[SourceFile, _Entry] = OrderedDict()
        self._lock = Lock()

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def path(self, file: SourceFile) -> Path:
        """Where a file lies on this machine."""
        return self._roots[file.root] / file.path

    @contextmanager
    def use(self, file: SourceFile) -> Iterator[int]:
        """A descriptor that stays open inside the `with`. Raises FormatError where the file cannot be opened.

        What an encoded file decodes to has no descriptor of its own: `read_into` reads it.
        """
        with self._lock:
            entry = self._entries.get(file)
            if entry is None:
                entry = self._entries[file] = _Entry(self._open(file))
            entry.users += 1
            self._entries.move_to_end(file)
        try:
            yield entry.descriptor
        finally:
            with self._lock:
                entry.users -= 1
                self._close_unused(self._most)

    def read_into(self, file: SourceFile, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `offset`; of an encoded file, from that byte of its decoded content.

        Raises FormatError where the file ends before, or cannot be read; where it is encoded, also OutputError.
        """
        if file.encoded is not None:
            self._decode().read_into(file, file.encoded, offset, buffer)
            return
        done = 0
        with self.use(file) as descriptor:
            while done < len(buffer):
                try:
                    count = os.preadv(descriptor, [buffer[done:]], offset + done)
                except OSError as error:
                    message = f"{self.path(file)}: cannot be read at byte {offset + done:,}: {error.strerror}"
                    raise FormatError(message) from error
                if count == 0:
                    raise self.truncated(file, offset + done, offset + len(buffer))
                done += count

    def truncated(self, file: SourceFile, end: int, needed: int) -> FormatError:
        """The error of a file that ends at byte `end`, though its directory promises bytes up to `needed`."""
        message = f"{self.path(file)}: ends at byte {end:,}, but bytes up to {needed:,} are needed"
        return FormatError(message, hint="the file was truncated, or is still being written: copy it again, then rerun")

    def stop(self) -> None:
        """Let threads that decode files fail soon: nobody waits for them any more."""
        if self._decoded is not None:
            self._decoded.stop()

    def close(self) -> None:
        """Close every descriptor that is not in use, and give scratch space back."""
        if self._decoded is not None:
            self._decoded.close()
        with self._lock:
            self._close_unused(0)

    def _decode(self) -> DecodedFiles:
        """Made on first use: most checkpoints have nothing to decode."""
        from unshard.files.scratch import DecodedFiles

        with self._lock:
            if self._decoded is None:
                self._decoded = DecodedFiles(self, self._scratch or Scratch())
            return self._decoded

    def _open(self, file: SourceFile) -> int:
        path = self.path(file)
        try:
            try:
                return os.open(path, os.O_RDONLY)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                self._close_unused(0)
                return os.open(path, os.O_RDONLY)
        except OSError as error:
            raise FormatError(f"{path}: cannot be opened: {error.strerror}") from error

    def _close_unused(self, most: int) -> None:
        """Close the longest unused descriptors until no more than `most` are open."""
        for file in list(self._entries) if len(self._entries) > most else ():
            entry = self._entries[file]
            if len(self._entries) > most and entry.users == 0:
                os.close(entry.descriptor)
                del self._entries[file]


def _descriptor_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1024 if soft == resource.RLIM_INFINITY else soft
