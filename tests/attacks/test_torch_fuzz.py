"""Random damage to real files, and random pickles: only FormatError may escape, and soon."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import golden_set
import torch_bytes as tb
from attacks.fuzz_torch_file import LIMITS, read_bytes
from unshard.errors import FormatError
from unshard.formats.torch_file.builder import RecordBuilder
from unshard.formats.torch_file.machine import Budget
from unshard.formats.torch_file.storages import Storages
from unshard.formats.torch_file.unpickler import OPERATIONS, unpickle

SMALL = 40_000
FUZZ = settings(max_examples=300, deadline=5_000, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _seeds() -> list[bytes]:
    """Small committed checkpoints by the real torch, and files that use what those do not."""
    found = sorted(golden_set.COMMITTED.glob("*/ckpt/**/*.pt"), key=lambda path: (path.stat().st_size, path))
    real = [path.read_bytes() for path in found[:12] if path.stat().st_size < SMALL]
    model = tb.mapping({"weight": tb.tensor(tb.legacy_storage())})
    return [*real, tb.archive(tb.torch_members(), zip64=True), tb.legacy(model, {"7": (6, tb.PAYLOAD)})]


SEEDS = _seeds()


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@FUZZ
@given(data=st.data())
def test_damaged_bytes(directory: Path, data: st.DataObject) -> None:
    damaged = bytearray(data.draw(st.sampled_from(SEEDS)))
    for _ in range(data.draw(st.integers(1, 8))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    read_bytes(bytes(damaged), directory)


@FUZZ
@given(data=st.data())
def test_bytes_cut_out_doubled_and_moved(directory: Path, data: st.DataObject) -> None:
    seed = data.draw(st.sampled_from(SEEDS))
    first, second, third = sorted(data.draw(st.integers(0, len(seed))) for _ in range(3))
    pieces = [seed[:first], seed[first:second], seed[second:third], seed[third:]]
    read_bytes(b"".join(data.draw(st.lists(st.sampled_from(pieces), max_size=6))), directory)


OPCODES = [bytes([code]) for code, operation in enumerate(OPERATIONS) if operation.__name__ != "_unknown"]
ARGUMENTS = [
    b"", b"\x00", b"\x01", b"\x02", b"1\n", b"os\nsystem\n", b"torch\nFloatStorage\n", b"\x03\0\0\0abc", b"\x03abc",
    b"\xff\xff\xff\xff", b"\x03\0\0\0\0\0\0\0abc", b"'a'\n", b"\x08" + b"\xff" * 8,
]  # fmt: skip
VALUES = [
    tb.tensor(tb.storage()), tb.storage(), tb.named("torch", "float32"), tb.named("torch._utils", "_rebuild_parameter"),
    tb.named("torch._tensor", "_rebuild_from_type_v2"), tb.named("collections", "OrderedDict"), tb.counts([2, 3]),
    tb.text("weight"), b"}", b"]", b")", b"N", b"(", b"K\x05", b"q\x01", b"h\x01", b"R", b"b", b"s", b"u", b"e", b"t",
]  # fmt: skip


class Nowhere:
    """A location where every storage fits."""

    def find(self, key: str, nbytes: int, numel: int) -> int:
        return 0


def run(pickled: bytes) -> None:
    budget = Budget(LIMITS)
    try:
        unpickle(pickled, RecordBuilder(Storages(tb.FILE, Nowhere()), budget, LIMITS), budget, LIMITS)
    except FormatError:
        return


@FUZZ
@given(st.lists(st.tuples(st.sampled_from(OPCODES), st.sampled_from(ARGUMENTS)), max_size=40))
def test_random_opcodes(steps: list[tuple[bytes, bytes]]) -> None:
    run(b"\x80\x02" + b"".join(code + argument for code, argument in steps) + b".")


@FUZZ
@given(st.lists(st.sampled_from(VALUES), max_size=40))
def test_random_programs_of_whole_values(parts: list[bytes]) -> None:
    run(b"\x80\x02" + b"".join(parts) + b".")


@FUZZ
@given(st.binary(max_size=200))
def test_random_bytes(directory: Path, data: bytes) -> None:
    run(data)
    read_bytes(data, directory)
    read_bytes(b"PK\x03\x04" + data, directory)
    read_bytes(tb.MAGIC + data, directory)
