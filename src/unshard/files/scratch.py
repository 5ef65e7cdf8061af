"""Encoded files, decoded once into scratch space and read there like any others.

Scratch space are temporary files without a name: whatever ends the process, nothing of them stays. Items lie in them
one after the other. When there is no room for another, the file that was not used for longest is given up, and an item
of it that is asked for again is decoded again.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from threading import Event, Lock
from typing import IO, TYPE_CHECKING

from unshard.errors import FormatError, OutputError
from unshard.files.room import Scratch
from unshard.files.zstd import decode
from unshard.tensors import Encoded, SourceFile

if TYPE_CHECKING:
    from unshard.files.descriptors import OpenFiles

SEGMENT = 64 << 20
"""Bytes after which another temporary file is begun."""

MOST_SEGMENTS = 64
"""How many temporary files a full scratch space consists of, where its items are smaller than those."""

MOST_BEHIND = 128 << 10
"""Bytes that a container may have behind what extents refer to: the directory of a zip takes about 1,500."""

_PAGE = 4096
_PROVER = "unshard.formats.dcp.encoded"
"""The module whose `prove` compares a decoded item with what its head promised. Formats read files, so that it can only
be imported once the first item is there."""


class StoppedError(Exception):
    """Nobody needs any more what was being decoded."""


@dataclass(slots=True, eq=False)
class _Segment:
    """A temporary file. `end` is where its next item will lie, `held` counts the bytes of items."""

    file: IO[bytes]
    end: int = 0
    held: int = 0
    users: int = 0


@dataclass(slots=True, eq=False)
class _Place:
    """Where an item is, once it is `ready`; `error` is why it never will be."""

    segment: _Segment
    start: int
    ready: Event = field(default_factory=Event)
    error: BaseException | None = None


class DecodedFiles:
    """The decoded content of encoded files. May be shared by threads; each item is decoded by the first that asks."""

    def __init__(self, files: OpenFiles, scratch: Scratch) -> None:
        self._files, self._scratch = files, scratch
        self._places: dict[SourceFile, _Place] = {}
        self._segments: list[_Segment] = []  # the longest unused first
        self._filling: _Segment | None = None
        self._lock = Lock()
        self._stopped = False

    def read_into(self, file: SourceFile, encoded: Encoded, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `offset` of the decoded content.

        Raises FormatError where the item is damaged or shorter than that, OutputError where there is no room for it.
        """
        if offset + len(buffer) > encoded.size:
            raise self._error(file, f"bytes up to {offset + len(buffer):,} of {encoded.size:,} decoded ones are needed")
        done = 0
        with self._use(file, encoded) as place:
            while done < len(buffer):
                at = place.start + offset + done
                done += os.preadv(place.segment.file.fileno(), [buffer[done:]], at)

    def stop(self) -> None:
        """Let everybody who decodes, or waits for it, fail soon."""
        self._stopped = True

    def close(self) -> None:
        """Give the scratch space back. Nothing may be read meanwhile."""
        for segment in self._segments:
            segment.file.close()
        self._segments.clear()
        self._places.clear()
        self._filling = None

    @contextmanager
    def _use(self, file: SourceFile, encoded: Encoded) -> Iterator[_Place]:
        with self._lock:
            known = self._places.get(file)
            place = known or self._reserve(file, encoded)
            place.segment.users += 1
            if self._segments[-1] is not place.segment:
                self._segments.remove(place.segment)
                self._segments.append(place.segment)
        try:
            if known is None:
                self._fill(place, file, encoded)
            place.ready.wait()
            if place.error is not None:
                raise place.error
            yield place
        finally:
            with self._lock:
                place.segment.users -= 1

    def _reserve(self, file: SourceFile, encoded: Encoded) -> _Place:
        """A place for an item, in the segment that is being filled or in a new one."""
        held = sum([segment.held for segment in self._segments])
        for unused in [segment for segment in self._segments if segment.users == 0]:
            if held + encoded.size <= self._scratch.room:
                break
            held -= unused.held
            self._give_up(unused)
        segment = self._filling
        if segment is None or segment.end >= max(SEGMENT, self._scratch.room // MOST_SEGMENTS):
            segment = self._filling = _Segment(self._open())
            self._segments.append(segment)
        place = self._places[file] = _Place(segment, segment.end)
        segment.held += encoded.size
        segment.end += -(-(encoded.size + MOST_BEHIND) // _PAGE) * _PAGE
        return place

    def _give_up(self, segment: _Segment) -> None:
        self._segments.remove(segment)
        self._filling = None if segment is self._filling else self._filling
        segment.file.close()
        self._places = {file: place for file, place in self._places.items() if place.segment is not segment}

    def _open(self) -> IO[bytes]:
        try:
            return tempfile.TemporaryFile(buffering=0, prefix=".unshard-", suffix=".tmp", dir=self._scratch.directory)
        except OSError as error:
            raise self._no_room(error) from error

    def _fill(self, place: _Place, file: SourceFile, encoded: Encoded) -> None:
        """Decode an item into its place, and prove that it is what was promised."""
        try:
            descriptor = place.segment.file.fileno()
            size = self._decode(file, encoded, descriptor, place.start)
            if encoded.holds is not None:
                import_module(_PROVER).prove(descriptor, place.start, size, encoded.holds)
        except FormatError as error:
            place.error = self._error(file, error.message, error.hint)
        except BaseException as error:
            place.error = error
        finally:
            if place.error is not None:
                with self._lock:
                    self._places.pop(file, None)
            place.ready.set()

    def _decode(self, file: SourceFile, encoded: Encoded, descriptor: int, start: int) -> int:
        """The bytes that were written."""
        pieces = decode(self._reader(file), encoded.start, encoded.length)
        done = 0
        for piece in pieces:
            if self._stopped:
                raise StoppedError
            if done + len(piece) > encoded.size + MOST_BEHIND:
                raise FormatError(f"decodes to more than the {encoded.size:,} bytes that its first ones promise")
            try:
                _write_all(descriptor, start + done, piece)
            except OSError as error:
                raise self._no_room(error) from error
            done += len(piece)
        if done < encoded.size:
            raise FormatError(f"decodes to {done:,} bytes, fewer than the {encoded.size:,} that its first ones promise")
        return done

    def _reader(self, file: SourceFile) -> Callable[[int, int], bytes]:
        raw = SourceFile(file.root, file.path)

        def read(offset: int, size: int) -> bytes:
            data = bytearray(size)
            self._files.read_into(raw, offset, memoryview(data))
            return bytes(data)

        return read

    def _error(self, file: SourceFile, message: str, hint: str | None = None) -> FormatError:
        encoded = file.encoded
        start = encoded.start if encoded else 0
        return FormatError(f"{self._files.path(file)}: the item at byte {start:,}: {message}", hint=hint)

    def _no_room(self, error: OSError) -> OutputError:
        place = self._scratch.directory or tempfile.gettempdir()
        text = f"{place}: compressed items cannot be decoded there: {error.strerror or error}"
        return OutputError(text, hint="free some space on that disk, or set TMPDIR to a directory on another")


def _write_all(descriptor: int, offset: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count
