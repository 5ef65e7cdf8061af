"""Zstandard streams: decoded in small pieces, damaged ones refused, whatever they claim."""

from __future__ import annotations

import random
import sys

import pytest

from dcp_bytes import compress
from unshard.errors import FormatError, UsageError
from unshard.files import zstd

pytest.importorskip("zstandard")

RANDOM = random.Random(0).randbytes(300_000)
CONTENTS = {
    "nothing": b"",
    "one byte": b"x",
    "one block": RANDOM[:1000],
    "incompressible": RANDOM,
    "a run": bytes(2_000_000),
    "mixed": RANDOM + bytes(500_000) + RANDOM,
}
SKIPPABLE = b"\x53\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"


def decode(stream: bytes, start: int = 0, ahead: int = 1 << 20) -> list[bytes]:
    def read(offset: int, size: int) -> bytes:
        assert 0 <= offset <= offset + size <= start + len(stream)
        return (b"?" * start + stream)[offset : offset + size]

    return list(zstd.decode(read, start, len(stream), ahead=ahead))


@pytest.mark.parametrize("ahead", [1, 100, 1 << 20])
@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_streams_are_decoded_in_pieces_of_a_block(content: bytes, ahead: int) -> None:
    import zstandard

    sized = zstandard.ZstdCompressor(write_checksum=True).compress(content)
    for stream in (compress(content), compress(content, write_checksum=True), sized, SKIPPABLE + sized + SKIPPABLE):
        pieces = decode(stream, start=7, ahead=ahead)
        assert b"".join(pieces) == content
        assert all(0 < len(piece) <= zstd.LARGEST_BLOCK for piece in pieces)


def test_frames_follow_each_other() -> None:
    assert b"".join(decode(compress(b"one ") + compress(b"") + compress(b"two"))) == b"one two"


def test_only_what_is_asked_for_is_read() -> None:
    """The head of a large item costs one block of it."""
    stream, reads = compress(RANDOM * 4), []

    def read(offset: int, size: int) -> bytes:
        reads.append(size)
        return stream[offset : offset + size]

    assert next(zstd.decode(read, 0, len(stream), ahead=1000)) == RANDOM[: zstd.LARGEST_BLOCK]
    assert sum(reads) < zstd.LARGEST_BLOCK + 2000


@pytest.mark.parametrize("options", [{}, {"write_checksum": True}], ids=str)
def test_a_stream_that_was_cut_short_is_told_from_one_that_ends(options: dict[str, bool]) -> None:
    stream = compress(RANDOM[:200] + bytes(1000), **options)
    for length in range(1, len(stream)):
        with pytest.raises(FormatError, match="ends within a frame"):
            decode(stream[:length])


@pytest.mark.parametrize("seed", range(20))
def test_damaged_streams_give_no_other_error(seed: int) -> None:
    damage, stream = random.Random(seed), bytearray(compress(RANDOM[:500] + bytes(5000), write_checksum=True))
    for _ in range(10):
        stream[damage.randrange(len(stream))] ^= 1 << damage.randrange(8)
    with pytest.raises(FormatError):
        decode(bytes(stream))


def test_a_wrong_checksum_is_damage() -> None:
    stream = bytearray(compress(RANDOM, write_checksum=True))
    stream[-1] ^= 1
    with pytest.raises(FormatError, match="the zstd stream is damaged before byte"):
        decode(bytes(stream))


def test_what_is_no_stream_is_refused() -> None:
    with pytest.raises(FormatError, match="no zstd stream: a frame begins with 50 4b 03 04"):
        decode(b"PK\x03\x04" + bytes(100))
    with pytest.raises(FormatError, match="a frame begins with 00 00 00 00"):
        decode(compress(b"x") + bytes(100))


def frame(flags: int, *fields: bytes) -> bytes:
    """A frame with this header and one empty block, the last."""
    return b"\x28\xb5\x2f\xfd" + bytes([flags]) + b"".join(fields) + b"\x01\x00\x00"


@pytest.mark.parametrize(
    "stream",
    [
        frame(0, bytes([(24 - 10) << 3])),
        frame(0, b"\xff"),
        frame(0xE0, (1 << 40).to_bytes(8, "little")),
        frame(0xA0, (9 << 20).to_bytes(4, "little")),
    ],
    ids=["16 MiB", "most", "one segment of 1 TiB", "one segment of 9 MiB"],
)
def test_large_windows_are_not_given(stream: bytes) -> None:
    with pytest.raises(FormatError, match="at most 8,388,608 are given"):
        decode(stream)


def test_blocks_larger_than_the_window_are_refused() -> None:
    window_of_1_kib = frame(0, b"\0")[:-3]
    run_of_128_kib = ((128 << 10) << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"x"
    with pytest.raises(FormatError, match="has a block of kind 1 and 131,072 bytes"):
        decode(window_of_1_kib + run_of_128_kib)


def test_the_largest_window_is_given() -> None:
    window_of_8_mib = frame(0, bytes([(23 - 10) << 3]))[:-3]
    block = ((128 << 10) << 3 | 1 << 1).to_bytes(3, "little") + b"x"
    assert b"".join(decode(window_of_8_mib + block * 80 + b"\x01\x00\x00")) == b"x" * (10 << 20)


def test_without_a_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    with pytest.raises(UsageError) as caught:
        decode(compress_nothing())
    assert caught.value.hint == "pip install 'unshard[zstd]'"


def compress_nothing() -> bytes:
    return bytes.fromhex("28b52ffd2000010000")
