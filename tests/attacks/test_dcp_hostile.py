"""Hostile and damaged DCP directories: each gives an UnshardError or a problem, in bounded time and memory."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dcp_bytes as db
import torch_bytes as tb
from unshard.errors import FormatError, UnshardError
from unshard.formats.dcp.container import Container, read_container
from unshard.formats.dcp.objects import read_item

WRONG = "torch never writes"
ONE = db.chunk((0,), (2,))
PLACE = db.info("__0_0.distcp", 0, 10)
HERE = [(db.index("w", (0,)), PLACE)]


def read(directory: Path, data: bytes) -> Container:
    (directory / ".metadata").write_bytes(data)
    return read_container(directory, db.ROOT)


def chunk_of(offsets: bytes, sizes: bytes) -> bytes:
    return db.instance("ChunkStorageMetadata", tb.mapping({"offsets": offsets, "sizes": sizes}))


def entry_of(chunks: bytes, shape: bytes | None = None, properties: bytes | None = None) -> bytes:
    dtype = tb.group(tb.named("torch", "float32"))
    state = {
        "properties": properties or db.instance("TensorProperties", dtype),
        "size": shape or db.size((2,)),
        "chunks": chunks,
    }
    return db.instance("TensorStorageMetadata", tb.mapping(state))


def with_entry(entry: bytes) -> bytes:
    return db.metadata({"w": entry}, HERE)


def with_place(index: bytes, info: bytes) -> bytes:
    return db.metadata({"w": db.tensor_entry((2,), [ONE])}, [(index, info)])


def info_of(**state: bytes) -> bytes:
    known = {"relative_path": tb.text("__0_0.distcp"), "offset": tb.integer(0), "length": tb.integer(4)}
    return db.instance("_StorageInfo", tb.mapping({**known, **state}), db.FILESYSTEM)


DAMAGED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "ends early"),
    "no pickle": (b"hello", "pickle"),
    "a half": (with_entry(db.tensor_entry((2,), [ONE]))[:200], "ends early"),
    "a tail": (with_entry(db.tensor_entry((2,), [ONE])) + b"x", "1 bytes follow"),
    "another object": (tb.finish(b"}"), "not the metadata of"),
    "a call": (tb.finish(tb.call(tb.named("os", "system"), tb.text("true"))), "not the metadata of"),
    "no entries": (tb.finish(db.instance("Metadata", b"}")), "not the metadata of"),
    "no places": (tb.finish(db.instance("Metadata", tb.mapping({"state_dict_metadata": b"}"}))), "does not say where"),
    "a storage": (tb.finish(tb.storage()), "refer to the storage of a tensor"),
    "its own entry": (tb.finish(tb.named("m", "Metadata") + b")\x81q\x05" + tb.mapping(
        {"state_dict_metadata": b"}" + tb.text("x") + b"h\x05s", "storage_data": b"}"}) + b"b"), "know: Metadata"),
    "an entry of text": (db.metadata({"w": tb.text("x")}, HERE), "do not know: str"),
    "a name that is a number": (tb.finish(db.instance("Metadata", tb.mapping({
        "state_dict_metadata": b"}" + tb.integer(3) + db.bytes_entry() + b"s", "storage_data": b"}"}))), "no text"),
    "chunks of no list": (with_entry(entry_of(tb.integer(1))), WRONG),
    "chunks that are numbers": (with_entry(entry_of(db.listed([tb.integer(1)]))), WRONG),
    "chunks that hold themselves": (with_entry(entry_of(b"]q\x07h\x07a")), WRONG),
    "a shape of text": (with_entry(entry_of(b"]", tb.text("2"))), WRONG),
    "a negative shape": (with_entry(entry_of(b"]", tb.counts((-2,)))), WRONG),
    "a shape of truth": (with_entry(entry_of(b"]", tb.group(b"\x88"))), WRONG),
    "a shape of 65 axes": (with_entry(entry_of(b"]", tb.counts([1] * 65))), WRONG),
    "a huge shape": (with_entry(entry_of(b"]", tb.counts([1 << 62, 4]))), "too many elements"),
    "a shape beyond counting": (with_entry(entry_of(b"]", tb.counts([1 << 80]))), WRONG),
    "no properties": (with_entry(entry_of(b"]", properties=b"N")), WRONG),
    "properties without a type": (with_entry(entry_of(b"]", properties=db.instance("P", b")"))), WRONG),
    "a type of text": (with_entry(entry_of(b"]", properties=db.instance("P", tb.group(b"N")))), "of no type"),
    "negative offsets": (with_entry(entry_of(db.listed([chunk_of(tb.counts((-1,)), tb.counts((2,)))]))), WRONG),
    "offsets of other axes": (with_entry(entry_of(db.listed([chunk_of(tb.counts((0, 0)), tb.counts((2,)))]))), WRONG),
    "chunks of other axes": (with_entry(entry_of(db.listed([db.chunk((0, 0), (1, 2))]))), WRONG),
    "an index of text": (with_place(tb.text("w"), PLACE), WRONG),
    "an index without a name": (with_place(db.instance("MetadataIndex", b"}"), PLACE), WRONG),
    "a place of text": (with_place(db.index("w", (0,)), tb.text("x")), WRONG),
    "a negative place": (with_place(db.index("w", (0,)), info_of(offset=tb.integer(-1))), WRONG),
    "a negative length": (with_place(db.index("w", (0,)), info_of(length=tb.integer(-1))), WRONG),
    "a place beyond counting": (with_place(db.index("w", (0,)), info_of(offset=tb.integer(1 << 70))), WRONG),
    "a path of bytes": (with_place(db.index("w", (0,)), info_of(relative_path=b"C\x01x")), WRONG),
    "transforms of numbers": (with_place(db.index("w", (0,)), info_of(transform_descriptors=db.listed([b"K\x01"]))),
                              WRONG),
    "countless transforms": (with_place(db.index("w", (0,)), info_of(
        transform_descriptors=db.listed([tb.text("x")] * 99))), WRONG),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_metadata_are_refused(tmp_path: Path, name: str) -> None:
    data, reason = DAMAGED[name]
    with pytest.raises(FormatError, match=reason) as caught:
        read(tmp_path, data)
    assert caught.value.message.startswith(".metadata: ")


@pytest.mark.parametrize(
    "steps",
    [b"N", tb.text("model"), b"]", tb.group(tb.text("m"), b"\x8a\x20" + b"\x7f" * 32), tb.group(b"\x88"),
     tb.group(b"G" + bytes(8)), tb.group(tb.integer(-1)), tb.group(*[tb.text("a")] * 99), tb.group()],
)  # fmt: skip
def test_paths_that_torch_never_writes_are_no_paths(tmp_path: Path, steps: bytes) -> None:
    paths = db.pairs([(tb.text("w"), steps), (tb.integer(1), steps)])
    data = db.metadata({"w": db.tensor_entry((2,), [ONE])}, HERE, paths=paths)
    assert read(tmp_path, data).paths in ({}, {"w": ()})


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x", "a/../../x", "..", "", "C:\\x", "\\\\host\\share\\x", "a\\..\\x", "a\0b", "//x"]
)
def test_files_outside_of_the_directory_are_refused(tmp_path: Path, path: str) -> None:
    entries = {"w": db.tensor_entry((2,), [ONE]), "step": db.bytes_entry()}
    info = db.info(path, 0, 4)
    container = read(tmp_path, db.metadata(entries, [(db.index("w", (0,)), info), (db.index("step"), info)]))
    assert len(container.problems) == 2
    assert all("names a file outside of the directory" in problem.message for problem in container.problems)
    assert container.items == {}


@pytest.mark.parametrize("kind", ["directory", "pipe", "endless name", "loop"])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    name = "x" * 5000 if kind == "endless name" else "__0_0.distcp"
    if kind == "directory":
        (tmp_path / name).mkdir()
    elif kind == "pipe":
        os.mkfifo(tmp_path / name)
    elif kind == "loop":
        (tmp_path / name).symlink_to(name)
    data = db.metadata({"w": db.tensor_entry((2,), [ONE])}, [(db.index("w", (0,)), db.info(name, 0, 4))])
    (problem,) = read(tmp_path, data).problems
    assert any(words in problem.message for words in ("not a regular file", "cannot be looked for", "is missing"))
    assert len(problem.message) < 1000


ITEMS: dict[str, tuple[bytes, str]] = {
    "zeros": (bytes(400), "zeros|safetensors"),
    "text": (b"hello" * 80, "safetensors"),
    "two bytes": (b"PK", "."),
    "no bytes": (b"", "."),
    "a directory of no members": (b"PK\x05\x06" + bytes(18), "empty zip"),
    "a state dict": (tb.archive(tb.torch_members()), "is a dict of 1 entries"),
    "another class": (tb.archive(tb.torch_members(tb.finish(db.instance("Thing", b"}", "evil")))), "evil.Thing"),
    "a long pickle": (tb.archive(tb.torch_members(tb.finish(tb.text("x" * 70_000)))), "at most 65536 are read"),
    "much work": (tb.archive(tb.torch_members(tb.finish(b"N0" * 20_000 + b"N"))), "more than 10000 operations"),
    "a safetensors header without offsets": (b"\x02" + bytes(7) + b"{}", "no piece of it at"),
}  # fmt: skip


@pytest.mark.parametrize("name", ITEMS)
def test_items_that_are_no_tensor_are_refused(tmp_path: Path, name: str) -> None:
    data, reason = ITEMS[name]
    (tmp_path / "__0_0.distcp").write_bytes(data)
    info = db.info("__0_0.distcp", 0, len(data))
    container = read(tmp_path, db.metadata({"w": db.tensor_entry((2,), [ONE])}, [(db.index("w", (0,)), info)]))
    (problem,) = container.problems
    assert isinstance(problem, FormatError)
    with pytest.raises(FormatError, match=reason):
        raise problem
    assert container.tensors["w"].chunks == ()


def test_one_list_of_pieces_does_not_work_for_many_tensors(tmp_path: Path) -> None:
    pieces = db.listed([ONE] * 500) + b"r\x00\x10\x00\x00"
    first = entry_of(pieces)
    others = {f"w{number}": entry_of(b"j\x00\x10\x00\x00") for number in range(500)}
    data = db.metadata({"w": first, **others}, HERE)
    with pytest.raises(FormatError, match="more pieces than it has room for"):
        read(tmp_path, data)


def test_only_one_safetensors_file_is_read_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes((b"\x02" + bytes(7) + b"{}") * 2)
    entries = {name: db.tensor_entry((2,), [ONE]) for name in ("v", "w")}
    places = [(db.index(name, (0,)), db.info("__0_0.distcp", start, 8)) for name, start in (("v", 10), ("w", 0))]
    problems = read(tmp_path, db.metadata(entries, places)).problems
    assert len(problems) == 2


def test_ranks_beyond_counting_are_no_world(tmp_path: Path) -> None:
    """Pieces of another shape than recorded start a search for the mesh, which must not walk through all ranks."""
    writer = db.Writer(tmp_path)
    writer.declare("w", (4,))
    writer.write("w", (0,), np.ones(2, np.float32), "__999999999_0.distcp", sizes=(4,))
    (problem,) = read_container(writer.finish(), db.ROOT).problems
    assert "pieces have other shapes" in problem.message


BOMBS: dict[str, bytes] = {
    "dicts": b"}" * 3_000_000,
    "memo": b"N" + b"\x94" * 3_000_000,
    "records": tb.named("m", "C") + b"q\x01" + b"h\x01)\x81" * 1_000_000,
    "copies of states": tb.mapping({str(number): b"N" for number in range(20_000)}) + b"q\x010"
    + tb.named("m", "C") + b")\x81" + b"h\x01b" * 500_000,
}  # fmt: skip

CHILD = """
import sys
from pathlib import Path
from unshard.errors import FormatError
from unshard.formats.dcp.container import read_container
try:
    read_container(Path(sys.argv[1]), "here")
except FormatError as error:
    print(error.message.splitlines()[0][:200])
status = Path("/proc/self/status")
if status.exists():
    print(next(int(line.split()[1]) // 1024 for line in status.open() if line.startswith("VmHWM")))
"""


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_take_no_more_than_metadata_of_their_size(tmp_path: Path, name: str) -> None:
    """3 MB may take 200 MiB, which is what metadata of that size need, and what the interpreter needs."""
    (tmp_path / ".metadata").write_bytes(tb.finish(BOMBS[name], 4))
    done = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    message, *peak = done.stdout.splitlines()
    assert "more objects than" in message
    assert not peak or int(peak[0]) < 250


@pytest.mark.parametrize("seed", range(4))
def test_random_damage_gives_errors_and_problems_only(tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    writer = db.sharded(tmp_path, {"a": np.ones((6, 4), np.float32), "b": np.ones(7, np.float16)})
    writer.write_object("step", tb.mapping({"x": tb.integer(3)}))
    writer.finish()
    whole = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for _ in range(150):
        name = generator.choice([".metadata", ".metadata", *whole])
        data = bytearray(whole[name])
        for _ in range(generator.choice([1, 1, 2, 8])):
            data[generator.randrange(len(data))] = generator.choice([0, 1, 255, generator.randrange(256)])
        if generator.random() < 0.2:
            del data[generator.randrange(len(data)) :]
        (tmp_path / name).write_bytes(data)
        with contextlib.suppress(UnshardError):
            container = read_container(tmp_path, db.ROOT)
            for item in container.items.values():
                read_item(item)
        (tmp_path / name).write_bytes(whole[name])
