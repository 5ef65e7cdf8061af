"""Safetensors headers made to deceive, to exhaust or to crash a reader."""

from __future__ import annotations

import json
import os
import struct
import time
import tracemalloc
from pathlib import Path

import pytest

from unshard.errors import FormatError
from unshard.formats.safetensors_file import SafetensorsFile, read_header
from unshard.tensors import SourceFile

GOOD = '"dtype":"U8","shape":[4],"data_offsets":[0,4]'


def good(template: str) -> str:
    """The template with the fields of a sound entry for each `@`."""
    return template.replace("@", GOOD)


def named(**entries: str) -> str:
    return "{" + ",".join(f'"{name}":{text}' for name, text in entries.items()) + "}"


def read(directory: Path, header: str | bytes, data: bytes = b"", length: int | None = None) -> SafetensorsFile:
    if isinstance(header, str):
        header = header.encode("utf-8", "surrogatepass")
    path = directory / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return read_header(path, SourceFile("source", "x.safetensors"))


def entry(shape: object = (4,), offsets: object = (0, 4), dtype: object = "U8") -> str:
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": offsets})


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ("", b"", "begin with"),
        ("[]", b"", "begin with"),
        (good(' {"a":{@}}'), b"1234", "begin with"),
        ("\ufeff{}", b"", "begin with"),
        (good('{"a":{@}'), b"1234", "expected"),
        (good('{"a":{@},}'), b"1234", "expected a string"),
        (good('{"a":{@}}x'), b"1234", "after the end"),
        (good('{"a":{@}}\0'), b"1234", "after the end"),
        (good('{"a":{@},"a":{@}}'), b"1234", "twice"),
        (good('{"a":{"dtype":"U8",@}}'), b"1234", "malformed"),
        (good('{"a":{@,"strides":[1]}}'), b"1234", "expected an object"),
        ('{"a":{"dtype":"U8","shape":[4]}}', b"1234", "expected an object"),
        ('{"a":["U8",[4],[0,4]]}', b"1234", "expected an object"),
        ('{"a":null}', b"", "expected an object"),
        (named(a=entry(dtype="U9")), b"1234", "unknown dtype"),
        (named(a=entry(dtype=["U8"])), b"1234", "unknown dtype"),
        (named(a=entry(dtype=8)), b"1234", "unknown dtype"),
        (named(a=entry([4.0])), b"1234", "no shape"),
        (named(a=entry([True], [0, 1])), b"1", "no shape"),
        (named(a=entry([-4])), b"1234", "no shape"),
        (named(a=entry("4")), b"1234", "no shape"),
        (named(a=entry([1] * 33 + [4])), b"1234", "no shape"),
        (named(a=entry([1 << 64])), b"1234", "no shape"),
        (named(a=entry([1 << 63, 2, 0], [0, 0])), b"", "overflows"),
        (named(a=entry([1 << 32, 1 << 32], [0, 0])), b"", "overflows"),
        (named(a=entry([10**1000])), b"1234", "malformed"),
        ('{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,4]}}', b"1234", "malformed"),
        ('{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,Infinity]}}', b"1234", "malformed"),
        (named(a=entry([4], [4, 0])), b"1234", "no data offsets"),
        (named(a=entry([4], [0, 4, 8])), b"1234", "no data offsets"),
        (named(a=entry([4], [0, 1e1])), b"1234", "no data offsets"),
        (named(a=entry([4], [False, 4])), b"1234", "no data offsets"),
        (named(a=entry([4], [0, 3])), b"123", "takes 4 bytes"),
        (named(a=entry([4], [1, 5])), b"12345", "hole"),
        (named(a=entry(), b=entry([2], [2, 4])), b"1234", "overlaps"),
        (named(a=entry(), b=entry()), b"1234", "overlaps"),
        (named(a=entry(), b=entry([2], [5, 7])), b"1234567", "hole"),
        (named(a=entry()), b"123", "the file at 3"),
        (named(a=entry()), b"12345", "the file at 5"),
        ("{}", b"1", "the file at 1"),
        (named(a=entry([3], [0, 2], "F4")), b"12", "even"),
        (named(a=entry([], [0, 1], "F4")), b"1", "even"),
        ('{"__metadata__":{"a":1}}', b"", "expected a string"),
        ('{"__metadata__":{"a":{}}}', b"", "expected a string"),
        ('{"__metadata__":null}', b"", "expected '{'"),
        ('{"__metadata__":{"a":"b","a":"c"}}', b"", "twice"),
        ('{"__metadata__":{},"__metadata__":{}}', b"", "twice"),
        (good('{"a\\u0000b":{@}}'), b"1234", "control characters"),
        (good('{"a\\u001b[31m":{@}}'), b"1234", "control characters"),
        (good('{"a\nb":{@}}'), b"1234", "malformed string"),
        (good('{"\\ud800":{@}}'), b"1234", "Unicode"),
        (good('{"\ud800":{@}}'), b"1234", "UTF-8"),
        (b'{"\xff":1}', b"", "UTF-8"),
        ('{"a":' + "[" * 100_000, b"", "nested too deeply"),
        ('{"a":' + '{"a":' * 100_000, b"", "malformed|nested"),
    ],
)
def test_a_hostile_header_is_refused(tmp_path: Path, header: str, data: bytes, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        read(tmp_path, header, data)


def test_what_the_cases_vary_is_accepted(tmp_path: Path) -> None:
    found = read(tmp_path, good('{"__metadata__":{"format":"pt"},"a":{@}}  '), b"1234")
    assert found.metadata == {"format": "pt"}
    assert found.tensors["a"].shape == (4,)


@pytest.mark.parametrize("length", [100_000_001, 1 << 63, (1 << 64) - 1])
def test_a_header_length_beyond_the_limit_is_refused(tmp_path: Path, length: int) -> None:
    with pytest.raises(FormatError, match="100,000,000 are allowed"):
        read(tmp_path, "{}", length=length)


def test_a_header_longer_than_the_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="truncated"):
        read(tmp_path, "{}", length=99_999_999)


@pytest.mark.parametrize("content", [b"", b"1234567"])
def test_a_file_without_a_length_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(FormatError, match="too few"):
        read_header(path, SourceFile("source", "x"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n", "Git LFS pointer"),
        (b"PK\x03\x04" + b"\xff" * 100, "torch.save"),
    ],
)
def test_what_is_no_safetensors_file_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=words):
        read_header(path, SourceFile("source", "x"))


def test_a_pipe_a_directory_and_nothing_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "directory.safetensors").mkdir()
    for name in ("pipe", "directory", "nothing"):
        with pytest.raises(FormatError, match=r"regular|cannot be read"):
            read_header(tmp_path / f"{name}.safetensors", SourceFile("source", "x"))


@pytest.mark.parametrize(
    "header",
    [
        '{"a":[' + "[]," * 2_000_000,
        '{"__metadata__":{' + '"a":"b",' * 700_000,
        '{"a":{"dtype":"U8","shape":[' + "0," * 3_000_000,
        "{" + " " * 6_000_000,
    ],
    ids=["lists", "metadata", "shape", "spaces"],
)
def test_a_large_header_costs_what_its_length_costs(tmp_path: Path, header: str) -> None:
    tracemalloc.start()
    started = time.monotonic()
    with pytest.raises(FormatError):
        read(tmp_path, header)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5 * len(header)
    assert time.monotonic() - started < 5


def test_the_number_of_tensors_is_bounded(tmp_path: Path) -> None:
    header = "{" + ",".join(f'"{number}":0' for number in range(10)) + "}"
    with pytest.raises(FormatError, match="expected an object"):
        read(tmp_path, header)
    many = '{"__metadata__":{' + ",".join(f'"{number}":""' for number in range(500_001)) + "}}"
    with pytest.raises(FormatError, match="more than 500,000 members"):
        read(tmp_path, many)
