"""Items that were compressed with zstd: found by their heads, merged, verified, refused where they lie."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import dcp_bytes as db
import torch_bytes as tb
import unshard
from unshard.dtypes import F16
from unshard.errors import FormatError, IncompleteError, OutputError, UnshardError
from unshard.files import Scratch
from unshard.formats.dcp.container import Container, read_container
from unshard.formats.dcp.objects import read_item
from unshard.plan.compiler import compile_plan
from unshard.plan.document import from_json, to_json
from unshard.plan.explain import explain
from unshard.plan.moves import Copy, Plan
from unshard.report.events import ignore
from unshard.run import preflight
from unshard.run.decoding import scratch_beside
from unshard.run.gathering import read_tensor
from unshard.run.local import run_plan
from unshard.settings import Settings
from unshard.target import Target, TargetFile
from unshard.tensors import Chunk, SourceFile, Tensor, concat, contiguous_chunk
from unshard.verify.contents import Pair, check_contents

pytest.importorskip("zstandard")

RANDOM = np.random.default_rng(0)
ARRAYS = {
    "a": RANDOM.standard_normal((40, 70), np.float32),
    "b": np.zeros((300, 500), np.float32),
    "c": RANDOM.integers(0, 1 << 40, (6, 8, 10)),
    "d": RANDOM.standard_normal(9, np.float32).astype(np.float16),
}
SETTINGS = Settings(jobs=2, buffer=16 << 10)
TWO = (2,)


def checkpoint(directory: Path, arrays: Mapping[str, np.ndarray] = ARRAYS, ranks: int = 2) -> Path:
    writer = db.Writer(directory, compressed=True)
    for name, array in arrays.items():
        writer.declare(name, array.shape, array.dtype.name)
        rows = -(-len(array) // ranks)
        for rank in range(ranks):
            piece = array[rank * rows : (rank + 1) * rows].copy()
            writer.write(name, (rank * rows, *[0] * (array.ndim - 1)), piece, f"__{rank}_0.distcp")
    return writer.finish()


def read(directory: Path) -> Container:
    return read_container(directory, db.ROOT)


def catalog(directory: Path) -> dict[str, Tensor]:
    container = read(directory)
    assert container.problems == ()
    return dict(container.tensors)


def only_problem(container: Container) -> UnshardError:
    (problem,) = container.problems
    return problem


def plan_of(directory: Path, tensors: Mapping[str, Tensor], **options: bool) -> Plan:
    """A plan of one raw file per tensor."""
    files = [TargetFile(name, tensor.size_in_bytes, tensors=((0, tensor),)) for name, tensor in tensors.items()]
    return compile_plan(Target(tuple(files), {db.ROOT: directory}), **options)


def merge(directory: Path, tensors: Mapping[str, Tensor], output: Path) -> dict[str, np.ndarray]:
    run_plan(plan_of(directory, tensors), output, SETTINGS, ignore)
    return {
        name: np.frombuffer((output / name).read_bytes(), tensor.dtype.numpy).reshape(tensor.shape)
        for name, tensor in tensors.items()
    }


def pairs_of(tensors: Mapping[str, Tensor]) -> list[Pair]:
    found = {
        name: (contiguous_chunk(SourceFile("output", name), 0, tensor.shape, tensor.dtype),)
        for name, tensor in tensors.items()
    }
    return [Pair(tensor, Tensor(name, tensor.dtype, tensor.shape, found[name])) for name, tensor in tensors.items()]


# What is read ---------------------------------------------------------------------------------------------------------


def test_pieces_of_two_ranks_make_tensors(tmp_path: Path) -> None:
    tensors = catalog(checkpoint(tmp_path))
    for name, array in ARRAYS.items():
        assert tensors[name].shape == array.shape
        assert [chunk.rank for chunk in tensors[name].chunks] == [0, 1]
        assert {chunk.extent.encoding for chunk in tensors[name].chunks} == {"zstd"}
        np.testing.assert_array_equal(read_tensor(tensors[name], {db.ROOT: tmp_path}), array)


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    arrays = {"scalar": np.array(2.5, np.float32), "empty": np.zeros((0, 3), np.float32)}
    writer = db.Writer(tmp_path, compressed=True)
    for name, array in arrays.items():
        writer.declare(name, array.shape)
        writer.write(name, (0,) * array.ndim, array)
    tensors = catalog(writer.finish())
    assert read_tensor(tensors["scalar"], {db.ROOT: tmp_path}) == 2.5
    assert tensors["empty"].chunks == ()


def test_an_item_is_read_as_it_was_strided(tmp_path: Path) -> None:
    turned = np.arange(60, dtype=np.float32).reshape(6, 10).T
    part = np.arange(40, dtype=np.float32).reshape(8, 5)[2:6, 1:4]
    writer = db.Writer(tmp_path, compressed=True)
    for name, array in (("turned", turned), ("part", part)):
        writer.declare(name, array.shape)
        writer.write(name, (0, 0), array)
    tensors = catalog(writer.finish())
    for name, array in (("turned", turned), ("part", part)):
        np.testing.assert_array_equal(read_tensor(tensors[name], {db.ROOT: tmp_path}), array)


def test_a_catalog_reads_the_head_of_an_item_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path, {"w": RANDOM.standard_normal((2, 1_000_000), np.float32)}, ranks=1)
    sizes: list[int] = []
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: sizes.append(size) or real(fd, size, at))
    catalog(tmp_path)
    assert (tmp_path / "__0_0.distcp").stat().st_size > 7_000_000
    assert sum(sizes) < 200_000


def test_objects_are_decoded(tmp_path: Path) -> None:
    writer = db.Writer(tmp_path, compressed=True)
    writer.write_object("step", tb.integer(7))
    writer.write_object("state", tb.mapping({"lr": tb.text("é"), "t": tb.tensor(tb.storage(numel=0), (0,), (1,))}))
    container = read(writer.finish())
    assert read_item(container.items["step"]) == 7
    state = read_item(container.items["state"])
    assert state["lr"] == "é"
    assert state["t"].storage.file.encoded.encoding == "zstd"


def test_a_large_object_is_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unshard.formats.dcp.objects.LARGEST", 10_000)
    writer = db.Writer(tmp_path, compressed=True)
    writer.write_object("bomb", tb.text("x" * 100_000))
    container = read(writer.finish())
    with pytest.raises(FormatError, match=r"__0_0\.distcp: the item at byte 0 decodes to more than 10,000 bytes"):
        read_item(container.items["bomb"])


def test_lazy_tensors_read_slices(tmp_path: Path) -> None:
    view = unshard.open(checkpoint(tmp_path))
    np.testing.assert_array_equal(view["a"][5:35:3, 7].numpy(), ARRAYS["a"][5:35:3, 7])


# What becomes of it ---------------------------------------------------------------------------------------------------


def test_slices_transposes_and_casts_are_merged_and_verified(tmp_path: Path) -> None:
    a, b, c, _ = catalog(checkpoint(tmp_path / "ckpt")).values()
    tensors = {
        "whole": b,
        "first": a.slice(0, 0, 23),
        "second": a.slice(0, 23, 40),
        "turned": b.transpose((1, 0)),
        "half": a.cast(F16),
        "inner": c.transpose((2, 0, 1)).slice(0, 2, 9, 3),
        "joined": concat([a.slice(1, 60, 70), a.slice(1, 0, 9)], 1),
    }
    tensors = {name: tensor.rename(name) for name, tensor in tensors.items()}
    first, second, third, _ = ARRAYS.values()
    expected = {
        "whole": second,
        "first": first[:23],
        "second": first[23:],
        "turned": second.T,
        "half": first.astype(np.float16),
        "inner": third.transpose(2, 0, 1)[2:9:3],
        "joined": np.concatenate([first[:, 60:], first[:, :9]], 1),
    }
    merged = merge(tmp_path / "ckpt", tensors, tmp_path / "out")
    for name, array in expected.items():
        np.testing.assert_array_equal(merged[name], array)
    roots = {db.ROOT: tmp_path / "ckpt"}, {"output": tmp_path / "out"}
    for mode in ("full", "sample"):
        result = check_contents(pairs_of(tensors), *roots, mode, SETTINGS, ignore)  # type: ignore[arg-type]
        assert result.problems == []
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(expected)


def test_verification_decodes_anew_and_finds_what_differs(tmp_path: Path) -> None:
    tensors = catalog(checkpoint(tmp_path / "ckpt"))
    merge(tmp_path / "ckpt", tensors, tmp_path / "out")
    data = bytearray((tmp_path / "out" / "b").read_bytes())
    data[400_000] ^= 1
    (tmp_path / "out" / "b").write_bytes(data)
    roots = {db.ROOT: tmp_path / "ckpt"}, {"output": tmp_path / "out"}
    (problem,) = check_contents(pairs_of(tensors), *roots, "full", SETTINGS, ignore).problems
    assert "`b`: the output differs from rank 1" in str(problem)


@pytest.mark.parametrize("differ", [False, True])
def test_replicas_are_compared_as_what_they_decode_to(tmp_path: Path, differ: bool) -> None:
    writer = db.Writer(tmp_path, compressed=True)
    writer.declare("w", (300, 100))
    array = np.arange(30_000, dtype=np.float32).reshape(300, 100)
    writer.write("w", (0, 0), array, "__0_0.distcp")
    (one,) = catalog(writer.finish())["w"].chunks
    array[299, 99] += differ
    other = db.Writer(tmp_path / "other", compressed=True)
    other.declare("w", (300, 100))
    other.write("w", (0, 0), array, "__1_0.distcp")
    (two,) = catalog(other.finish())["w"].chunks
    moved = replace(two, extent=replace(two.extent, file=replace(two.extent.file, path="other/__1_0.distcp")), rank=1)
    tensor = Tensor("w", one.extent.dtype, (300, 100), (one, moved))
    plan = plan_of(tmp_path, {"w": tensor}, check_replicas=True)
    if not differ:
        run_plan(plan, tmp_path / "out", SETTINGS, ignore)
        assert (tmp_path / "out" / "w").read_bytes() == array.tobytes()
        return
    with pytest.raises(IncompleteError, match=r"rank 1 .* differs from rank 0"):
        run_plan(plan, tmp_path / "out", SETTINGS, ignore)
    assert not (tmp_path / "out").exists()


def test_plans_carry_the_encoding(tmp_path: Path) -> None:
    tensors = catalog(checkpoint(tmp_path / "ckpt"))
    plan = plan_of(tmp_path / "ckpt", tensors)
    assert not any(isinstance(move, Copy) for file in plan.files for move in file.moves)
    loaded = from_json(to_json(plan))
    assert loaded == plan
    run_plan(loaded, tmp_path / "out", SETTINGS, ignore)
    assert (tmp_path / "out" / "a").read_bytes() == ARRAYS["a"].tobytes()
    sizes = [chunk.extent.file.encoded for tensor in tensors.values() for chunk in tensor.chunks]
    assert f"decodes {len(sizes)} pieces compressed with zstd: " in "\n".join(explain(plan))


@pytest.mark.parametrize(
    ("encoded", "piece", "message"),
    [
        ({"encoding": "rot13"}, "zstd", "the encoding of __0_0.distcp is 'rot13', not zstd"),
        ({"size": -1}, "zstd", "size of __0_0.distcp is -1"),
        ({"holds": 5}, "zstd", "holds of __0_0.distcp is 5"),
        ({"more": 5}, "zstd", "the fields of the encoding of __0_0.distcp"),
        ({}, "plain", "the encoding of a piece is 'plain', not zstd, as its source is"),
    ],
)
def test_damaged_plans_are_refused(tmp_path: Path, encoded: dict[str, object], piece: str, message: str) -> None:
    document = to_json(plan_of(tmp_path, catalog(checkpoint(tmp_path, {"w": np.ones(8, np.float32)}, ranks=1))))
    document["sources"][0][2] |= encoded
    document["files"][0]["moves"][0]["pieces"][0]["encoding"] = piece
    with pytest.raises(FormatError, match=message):
        from_json(document)


def test_a_plan_that_would_copy_compressed_bytes_is_refused(tmp_path: Path) -> None:
    document = to_json(plan_of(tmp_path, catalog(checkpoint(tmp_path, {"w": np.ones(8, np.float32)}, ranks=1))))
    document["files"][0]["moves"] = [{"kind": "copy", "to": 0, "size": 32, "source": 0, "from": 0}]
    with pytest.raises(FormatError, match=r"__0_0\.distcp must be decoded, which a copy does not do"):
        from_json(document)


def test_the_room_to_decode_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.zeros((2, 100_000), np.float32)
    plan = plan_of(tmp_path, catalog(checkpoint(tmp_path, {"w": array}, ranks=1)))
    scratch = scratch_beside(tmp_path / "out", plan, SETTINGS)
    assert scratch == Scratch(tmp_path, plan.files[0].moves[0].pieces[0].extent.file.encoded.size)  # type: ignore[union-attr]
    free = os.statvfs_result([4096, 4096, 1000, 300, 300, 0, 0, 0, 0, 255])
    monkeypatch.setattr(preflight.os, "statvfs", lambda _: free)
    with pytest.raises(OutputError, match=r"1\.6 MB are needed \(800 kB of them for a while, to decode compressed"):
        run_plan(plan, tmp_path / "out", SETTINGS, ignore)
    assert preflight.check_output(plan, tmp_path / "out", overwrite=False) == []


# What is refused ------------------------------------------------------------------------------------------------------


def write_items(directory: Path, data: bytes, transforms: list[str], names: tuple[str, ...] = ("w",)) -> Container:
    writer = db.Writer(directory)
    for name in names:
        writer.declare(name, TWO)
        writer.write_item(name, (0,), TWO, data, transforms=transforms)
    return read(writer.finish())


@pytest.mark.parametrize(
    "transforms",
    [["stream.zstd/2"], ["stream.zstd@example/1"], ["stream.zstd"], ["stream.zstd/1", "stream.zstd/1"], ["x"]],
    ids=str,
)
def test_other_transforms_and_chains_are_refused_once_by_name(tmp_path: Path, transforms: list[str]) -> None:
    container = write_items(tmp_path, db.compress(b"x"), transforms, ("v", "w"))
    problem = only_problem(container)
    names = ", ".join(map(repr, transforms))
    assert problem.message == f"written through {names}, which is not undone here: 2 tensors (`v`, `w`)"
    writer = db.Writer(tmp_path / "object")
    writer.objects.append("o")
    writer.places.append((db.index("o"), writer._append("__0_0.distcp", b"x", transforms)))
    with pytest.raises(FormatError, match=r"__0_0\.distcp: written through"):
        read_item(read(writer.finish()).items["o"])


def test_a_minor_version_is_read(tmp_path: Path) -> None:
    container = write_items(tmp_path, db.compress(db.item(np.ones(2, np.float32))), ["stream.zstd/1.5"])
    assert container.problems == ()


def test_without_a_library_there_is_one_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    problem = only_problem(read(tmp_path))
    assert "no library that decodes it is installed: 4 tensors (`a`, `b`, `c` and 1 more)" in problem.message
    assert problem.hint == "pip install 'unshard[zstd]'"


@pytest.mark.parametrize("behind", [b"", b"\x50\x00\x00\x00\x00\x00\x00\x00{}"])
def test_safetensors_behind_empty_streams_are_called_so(tmp_path: Path, behind: bytes) -> None:
    problem = only_problem(write_items(tmp_path, db.compress(b"") + behind, [db.ZSTD]))
    assert "SerializationFormat.SAFETENSORS and an extension, which torch cannot load either: 1 tensor" in str(problem)


def items() -> dict[str, tuple[bytes, str]]:
    """Item → what the error says of it."""
    plain = db.item(np.ones(2, np.float32))
    stored = tb.storage(numel=2)
    pickle = tb.finish(tb.tensor(stored, (2,), (1,)))
    members = tb.torch_members(pickle, b"\0" * 8)
    big = [replace(member, data=b"big") if member.name.endswith("byteorder") else member for member in members]
    huge = tb.finish(tb.tensor(tb.storage(numel=1 << 50), (2,), (1,)))
    return {
        "plain": (plain, "no zstd stream: a frame begins with 50 4b 03 04"),
        "cut short": (db.compress(plain)[:30], "the zstd stream ends within a frame"),
        "no archive": (db.compress(b"hello" * 100), "it does not begin with data.pkl"),
        "an empty archive": (db.compress(tb.archive([])), "it does not begin with data.pkl"),
        "another order": (db.compress(tb.archive(members[::-1])), "it does not begin with data.pkl"),
        "big-endian": (db.compress(tb.archive(big)), "big-endian"),
        "no storage": (db.compress(tb.archive(members[:2])), "storage 0 does not begin within the first"),
        "an object": (db.compress(tb.archive(tb.torch_members(tb.finish(tb.integer(5))))), "the tensor is the value 5"),
        "a bomb": (db.compress(tb.archive(tb.torch_members(huge, b"\0" * 8))), "cannot decode to the 4,503,599,627"),
        "no pickle": (db.compress(tb.archive(tb.torch_members(b"\xff" * 40))), "unknown opcode 0xff"),
    }


@pytest.mark.parametrize(("item", "message"), items().values(), ids=items())
def test_damaged_heads_are_named(tmp_path: Path, item: bytes, message: str) -> None:
    problem = only_problem(write_items(tmp_path, item, [db.ZSTD]))
    assert isinstance(problem, FormatError)
    assert problem.message.startswith("`w`: __0_0.distcp: the item at byte 0: ")
    assert message in problem.message


def whole_items() -> dict[str, tuple[bytes, str]]:
    """Item with a good head → why its whole is refused."""
    stored = tb.storage(numel=3)
    one, other = [tb.finish(tb.tensor(stored, TWO, (1,), start)) for start in (0, 1)]
    payload = np.arange(3, dtype=np.float32).tobytes()
    members = tb.torch_members(one, payload)
    good = tb.archive(members)
    hidden = [
        replace(members[0], name="archive/version", local_name="archive/data.pkl"),
        replace(members[0], data=other),
        *members[1:3],
    ]
    return {
        "a flipped bit": (good.replace(payload, payload[:-1] + b"\x41"), "the checksum of storage 0 does not hold"),
        "no directory": (good[:-30], "not a complete file"),
        "bytes behind": (good + b"x" * 10, "not a complete file"),
        "another pickle in the directory": (
            tb.archive(hidden),
            "its directory tells of F32 [2], strides [1], from",
        ),
        "a member that runs over": (
            tb.archive([replace(member, listed_size=99) if member is members[2] else member for member in members]),
            "",
        ),
        "much behind": (tb.archive([*members, tb.Entry("archive/more", bytes(200_000))]), "decodes to more than the"),
        "an end too early": (good[: good.index(payload) + 11], "fewer than the"),
    }


@pytest.mark.parametrize(("data", "message"), whole_items().values(), ids=whole_items())
def test_what_only_the_whole_item_shows_stops_the_merge(tmp_path: Path, data: bytes, message: str) -> None:
    container = write_items(tmp_path, db.compress(data), [db.ZSTD])
    assert container.problems == ()
    plan = plan_of(tmp_path, dict(container.tensors))
    with pytest.raises(FormatError) as caught:
        run_plan(plan, tmp_path / "out", SETTINGS, ignore)
    assert "__0_0.distcp: the item at byte 0: " in caught.value.message
    assert message in caught.value.message
    assert not (tmp_path / "out").exists()
    with pytest.raises(FormatError):
        read_tensor(container.tensors["w"], {db.ROOT: tmp_path})


def test_checksums_that_torch_did_not_compute_do_not_count(tmp_path: Path) -> None:
    """torch.serialization.set_crc32_options(False) leaves zeros."""
    array = np.arange(2, dtype=np.float32)
    data = db.item(array)
    listed = data.rindex(b"PK\x01\x02", 0, data.index(b"archive/data/0", data.index(b"PK\x01\x02")))
    for checksum in (b"\0\0\0\0", b"\1\0\0\0"):
        place = tmp_path / checksum.hex()
        changed = data[: listed + 16] + checksum + data[listed + 20 :]
        tensor = write_items(place, db.compress(changed), [db.ZSTD]).tensors["w"]
        if any(checksum):
            with pytest.raises(FormatError, match="the checksum of storage 0"):
                read_tensor(tensor, {db.ROOT: place})
        else:
            np.testing.assert_array_equal(read_tensor(tensor, {db.ROOT: place}), array)


def test_an_item_changed_after_the_plan_is_refused(tmp_path: Path) -> None:
    """Same length, another tensor: the plan carries what the item must hold."""
    array = np.arange(60, dtype=np.float32).reshape(6, 10)
    tensors = catalog(checkpoint(tmp_path, {"w": array}, ranks=1))
    (chunk,) = tensors["w"].chunks
    encoded = chunk.extent.file.encoded
    assert encoded is not None
    assert encoded.holds is not None
    other = replace(encoded, holds=encoded.holds.replace("F32", "F64"))
    changed = Chunk(chunk.box, replace(chunk.extent, file=replace(chunk.extent.file, encoded=other)))
    with pytest.raises(FormatError, match=r"tells of F32 \[6, 10\].*its first bytes of F64 \[6, 10\]"):
        read_tensor(replace(tensors["w"], chunks=(changed,)), {db.ROOT: tmp_path})
