"""Zstandard streams, decoded in bounded memory whatever they say of themselves (RFC 8878).

The frames are walked here, and given to a library block by block: so no call returns more than 128 KiB, where a stream
ends is known, and a stream that was cut short is told from one that ends. Python has the library since 3.14
(`compression.zstd`), before it is the package `zstandard`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, TypeAlias

from unshard.errors import FormatError, UsageError

LARGEST_BLOCK = 128 << 10
"""Bytes of decoded content that one block can hold."""

SMALLEST_BLOCK = 4
"""Bytes of a block that repeats one byte: no stream decodes to more than 32,768 times its length."""

LARGEST_WINDOW = 8 << 20
"""Bytes of history that a decoder keeps. What RFC 8878 recommends to support; torch's writer asks for 2 MiB."""

MEMORY = LARGEST_WINDOW + (3 << 20)
"""Bytes that decoding takes at most: the window, what was read ahead, blocks."""

INSTALL = "pip install 'unshard[zstd]'"

Read: TypeAlias = Callable[[int, int], bytes]
"""(offset, size) → exactly so many bytes; FormatError where they are not there."""

_FRAME = 0xFD2FB528
_SKIPPABLE = 0x184D2A50
"""The last four bits are free."""
_RAW, _RUN, _COMPRESSED = 0, 1, 2
_CUT_SHORT = "the zstd stream ends within a frame"
_DAMAGED = "the file was damaged or truncated: copy it again, or take an earlier checkpoint"


def check_library() -> None:
    """Raise UsageError where nothing that decodes zstd is installed."""
    _find_library()


def decode(read: Read, start: int, length: int, *, ahead: int = 1 << 20) -> Iterator[bytes]:
    """The decoded content of the stream of `length` bytes from byte `start` on, in pieces of at most 128 KiB.

    ahead: bytes that are read at once.

    Raises FormatError where the bytes are no sequence of whole frames, are damaged, or need a larger window than 8 MiB;
    UsageError where no library is installed.
    """
    module, error_type = _find_library()
    source = _Input(read, start, start + length, ahead)
    try:
        while source.left:
            yield from _frame(source, module)
    except error_type as error:
        place = f"before byte {source.position - start:,}"
        raise FormatError(f"the zstd stream is damaged {place}: {error}", hint=_DAMAGED) from error


class _Input:
    """The bytes of a stream, taken one after the other. Reads ahead."""

    def __init__(self, read: Read, start: int, stop: int, ahead: int) -> None:
        self._read, self._stop, self._ahead = read, stop, ahead
        self._data, self._at, self._next = b"", 0, start

    @property
    def left(self) -> int:
        """Bytes that were not taken yet."""
        return self._stop - self.position

    @property
    def position(self) -> int:
        return self._next - len(self._data) + self._at

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise FormatError(_CUT_SHORT, hint=_DAMAGED)
        missing = size - (len(self._data) - self._at)
        if missing > 0:
            more = self._read(self._next, min(max(missing, self._ahead), self._stop - self._next))
            self._data, self._at, self._next = self._data[self._at :] + more, 0, self._next + len(more)
        self._at += size
        return self._data[self._at - size : self._at]

    def skip(self, size: int) -> None:
        if size > self.left:
            raise FormatError(_CUT_SHORT, hint=_DAMAGED)
        self._data, self._at, self._next = b"", 0, self.position + size


def _frame(source: _Input, module: Any) -> Iterator[bytes]:
    """The content of the next frame."""
    magic = source.take(4)
    number = int.from_bytes(magic, "little")
    if number & ~0xF == _SKIPPABLE:
        source.skip(int.from_bytes(source.take(4), "little"))
        return
    if number != _FRAME:
        raise FormatError(f"no zstd stream: a frame begins with {magic.hex(' ')}", hint=_DAMAGED)
    header, window, has_checksum = _frame_header(source)
    decoder = _new_decoder(module)
    decoder.decompress(magic + header)
    is_last = False
    while not is_last:
        head = source.take(3)
        fields = int.from_bytes(head, "little")
        is_last, kind, size = bool(fields & 1), fields >> 1 & 3, fields >> 3
        if kind > _COMPRESSED or size > min(window, LARGEST_BLOCK):
            raise FormatError(f"the zstd stream has a block of kind {kind} and {size:,} bytes", hint=_DAMAGED)
        content = decoder.decompress(head + source.take(1 if kind == _RUN else size))
        if content:
            yield content
    if has_checksum:
        decoder.decompress(source.take(4))
    if not decoder.eof:
        raise FormatError(_CUT_SHORT, hint=_DAMAGED)


def _frame_header(source: _Input) -> tuple[bytes, int, bool]:
    """The header behind the magic number, the size of the window, and whether a checksum follows the blocks."""
    head = source.take(1)
    flags = head[0]
    is_single = bool(flags & 0x20)
    content_bytes = (1 if is_single else 0, 2, 4, 8)[flags >> 6]
    window_field = b"" if is_single else source.take(1)
    content_field = source.take((0, 1, 2, 4)[flags & 3] + content_bytes)
    if is_single:
        window = int.from_bytes(content_field[-content_bytes:], "little") + (256 if content_bytes == 2 else 0)
    else:
        base = 1 << 10 + (window_field[0] >> 3)
        window = base + base // 8 * (window_field[0] & 7)
    if window > LARGEST_WINDOW:
        raise FormatError(
            f"the zstd stream needs a window of {window:,} bytes; at most {LARGEST_WINDOW:,} are given",
            hint="load the checkpoint with torch and save it again",
        )
    return head + window_field + content_field, window, bool(flags & 4)


def _new_decoder(module: Any) -> Any:
    """What has `decompress(data) -> bytes`, which returns all that the data make known, and `eof`."""
    if module.__name__ == "zstandard":
        return module.ZstdDecompressor(max_window_size=LARGEST_WINDOW).decompressobj()
    return module.ZstdDecompressor()


def _find_library() -> tuple[Any, type[Exception]]:
    """The module that decodes, and the error that it raises. Python may have been built without its own."""
    for name in ("compression.zstd", "zstandard") if sys.version_info >= (3, 14) else ("zstandard",):
        try:
            module = import_module(name)
        except ImportError:
            continue
        return module, module.ZstdError
    raise UsageError("compressed with zstd, and no library that decodes it is installed", hint=INSTALL)
