"""Plans that are run: every kind of move, in one file and in several, with any number of threads."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from running import ROOT, copied_file, literal_file, plan, raw, tree, write_array
from unshard.dtypes import BF16, F16, F32, U8
from unshard.errors import FormatError
from unshard.plan.moves import Compute, Copy, Literal, Operand, Plan, PlannedFile, Tile
from unshard.report.events import Advanced, Event, PhaseFinished, PhaseStarted, ignore
from unshard.run import functions
from unshard.run.functions import register
from unshard.run.local import run_plan
from unshard.run.threads import Budget
from unshard.settings import Settings
from unshard.target import Seal
from unshard.tensors import Chunk, Encoded, Extent, SourceFile, Tensor, concat

SMALL = Settings(jobs=2, memory=1 << 16, buffer=1 << 10)
RANDOM = np.random.default_rng(0)


def tile(destination: int, tensor: Tensor) -> Tile:
    return Tile(destination, tensor.dtype, tensor.grid, tensor.chunks, tensor.name)


def operand(tensor: Tensor, banded: int | None) -> Operand:
    return Operand(tensor.dtype, tensor.shape, tensor.grid, tensor.chunks, banded)


@pytest.fixture
def doubled() -> Iterator[str]:
    """A registered function: twice the first input, plus the second."""

    @register("test_doubled", footprint=8)
    def double(inputs: Sequence[np.ndarray], parameters: Mapping[str, object]) -> np.ndarray:
        result: np.ndarray = inputs[0].astype(np.float32) * parameters["factor"] + inputs[1].astype(np.float32)
        return result

    yield "test_doubled"
    del functions._FUNCTIONS["test_doubled"]


def every_move(directory: Path, function: str) -> tuple[Plan, dict[str, bytes]]:
    """A plan with all kinds of moves, and the bytes that it must write."""
    a = RANDOM.standard_normal((40, 64)).astype(np.float32)
    b = RANDOM.standard_normal((40, 32)).astype(np.float32)
    bias = RANDOM.standard_normal(96).astype(np.float32)
    left, right = write_array(directory, "a", a, padding=5), write_array(directory, "b", b)
    columns = concat([left, right], 1, name="columns")
    joined = np.concatenate([a, b], 1)
    computed = joined * np.float32(2) + bias
    moves = (
        Literal(0, b"header"),
        Copy(6, a.nbytes, left.chunks[0].extent.file, 5),
        tile(6 + a.nbytes, columns),
        tile(6 + a.nbytes + joined.nbytes, columns.transpose().cast(BF16)),
        Compute(
            6 + a.nbytes + joined.nbytes * 3 // 2,
            F16,
            columns.shape,
            function,
            {"factor": 2},
            (operand(columns, 0), operand(write_array(directory, "bias", bias), None)),
            "computed",
        ),
    )
    expected = (
        b"header"
        + a.tobytes()
        + joined.tobytes()
        + joined.T.astype(BF16.numpy).tobytes()
        + computed.astype(np.float16).tobytes()
    )
    weights = PlannedFile("model.bin", len(expected), moves)
    other = copied_file("copy.bin", [("b", 0, 100), ("b", 50, b.nbytes - 50), ("a", 5, 64)])
    copied = b.tobytes()[:100] + b.tobytes()[50:] + a.tobytes()[:64]
    files = (literal_file("nested/deep/config.json", b"{}"), literal_file("empty.txt", b""), weights, other)
    index = literal_file("index.json", b"[]", last=True)
    return plan(directory, *files, index), {
        "nested/deep/config.json": b"{}",
        "empty.txt": b"",
        "model.bin": expected,
        "copy.bin": copied,
        "index.json": b"[]",
    }


@pytest.mark.parametrize("jobs", [1, 2, 4])
@pytest.mark.parametrize("buffer", [64, 1000, 1 << 20])
def test_every_kind_of_move(tmp_path: Path, doubled: str, jobs: int, buffer: int) -> None:
    todo, expected = every_move(tmp_path, doubled)
    result = run_plan(todo, tmp_path / "out", Settings(jobs, 1 << 16, buffer), ignore)
    assert tree(tmp_path / "out") == expected
    assert {name: found.elements for name, found in result.rounded.items()} == {"columns": 3840, "computed": 3840}


def test_bands_of_computed_tensors_do_not_depend_on_settings(tmp_path: Path, doubled: str) -> None:
    shapes: list[tuple[int, ...]] = []

    @register("test_watched")
    def watched(inputs: Sequence[np.ndarray], _: Mapping[str, object]) -> np.ndarray:
        shapes.append(inputs[0].shape)
        return inputs[0]

    try:
        tensor = write_array(tmp_path, "a", np.zeros((300, 10_000), np.float32))
        move = Compute(0, F32, tensor.shape, "test_watched", {}, (operand(tensor, 0),), "a")
        todo = plan(tmp_path, PlannedFile("m", move.size, (move,)))
        run_plan(todo, tmp_path / "one", Settings(1, 1 << 20, 1 << 12), ignore)
        first, shapes = sorted(shapes), []
        run_plan(todo, tmp_path / "two", Settings(3, 1 << 28, 1 << 20), ignore)
        assert sorted(shapes) == first
        assert len(first) > 1
    finally:
        del functions._FUNCTIONS["test_watched"]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_operands_cut_along_any_axis_of_any_grid(tmp_path: Path, axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the output are an axis of the operand that is itself a product of grid axes."""
    monkeypatch.setattr(functions, "BAND", 16 * 20 * 7)
    values = RANDOM.standard_normal((6, 4, 5)).astype(np.float32)
    moved = write_array(tmp_path, "a", values).reshape((2, 3, 4, 5)).transpose((1, 0, 2, 3)).reshape((6, 4, 5))
    expected = np.moveaxis(values.reshape(2, 3, 4, 5).transpose(1, 0, 2, 3).reshape(6, 4, 5), axis, 0)

    @register("test_moved")
    def move_axis(inputs: Sequence[np.ndarray], _: Mapping[str, object]) -> np.ndarray:
        return np.moveaxis(inputs[0], axis, 0)

    try:
        move = Compute(0, F32, expected.shape, "test_moved", {}, (operand(moved, axis),), "a")
        run_plan(plan(tmp_path, PlannedFile("m", move.size, (move,))), tmp_path / "out", SMALL, ignore)
    finally:
        del functions._FUNCTIONS["test_moved"]
    assert (tmp_path / "out" / "m").read_bytes() == expected.tobytes()


def test_a_function_that_cannot_be_cut_gets_everything_at_once(tmp_path: Path) -> None:
    @register("test_whole")
    def whole(inputs: Sequence[np.ndarray], _: Mapping[str, object]) -> np.ndarray:
        result: np.ndarray = inputs[0] - inputs[0].mean(dtype=np.float64)
        return result

    try:
        values = np.arange(5000, dtype=np.float32).reshape(1000, 5)
        tensor = write_array(tmp_path, "a", values)
        move = Compute(0, F32, tensor.shape, "test_whole", {}, (operand(tensor, None),), "a")
        run_plan(plan(tmp_path, PlannedFile("m", move.size, (move,))), tmp_path / "out", SMALL, ignore)
    finally:
        del functions._FUNCTIONS["test_whole"]
    assert (tmp_path / "out" / "m").read_bytes() == (values - 2499.5).astype(np.float32).tobytes()


def test_nan_and_overflow_are_counted_over_all_bands(tmp_path: Path) -> None:
    values = np.ones((64, 100), np.float32)
    values[3, 5] = values[60, 1] = np.nan
    values[::2, 7] = 1e6
    values[9, 9] = np.inf
    tensor = write_array(tmp_path, "w", values).cast(F16)
    todo = plan(tmp_path, PlannedFile("m", tensor.size_in_bytes, (tile(0, tensor),)))
    found = run_plan(todo, tmp_path / "out", SMALL, ignore).rounded["w"]
    assert (found.elements, found.nan, found.overflow) == (6400, 2, 32)


def test_tensors_that_are_only_moved_are_not_called_rounded(tmp_path: Path) -> None:
    tensor = write_array(tmp_path, "w", np.ones((64, 100), np.float32)).transpose()
    todo = plan(tmp_path, PlannedFile("m", tensor.size_in_bytes, (tile(0, tensor),)))
    assert run_plan(todo, tmp_path / "out", SMALL, ignore).rounded == {}


def test_a_scalar(tmp_path: Path) -> None:
    tensor = write_array(tmp_path, "w", np.full((), 1.5, np.float32)).cast(BF16)
    run_plan(plan(tmp_path, PlannedFile("m", 2, (tile(0, tensor),))), tmp_path / "out", SMALL, ignore)
    assert (tmp_path / "out" / "m").read_bytes() == np.array(1.5, BF16.numpy).tobytes()


def test_many_pieces_in_many_bands(tmp_path: Path) -> None:
    values = RANDOM.standard_normal((2000, 16)).astype(np.float32)
    whole = write_array(tmp_path, "w", values)
    pieces = [whole.slice(0, start, start + 10) for start in range(0, 2000, 10)]
    tensor = concat(pieces[::-1], name="w").cast(BF16)
    todo = plan(tmp_path, PlannedFile("m", tensor.size_in_bytes, (tile(0, tensor),)))
    run_plan(todo, tmp_path / "out", SMALL, ignore)
    expected = np.concatenate([values[start : start + 10] for start in range(1990, -1, -10)])
    assert (tmp_path / "out" / "m").read_bytes() == raw(expected.astype(BF16.numpy), BF16).tobytes()


def test_seals_cover_what_was_written_before_them(tmp_path: Path) -> None:
    tensor = write_array(tmp_path, "a", RANDOM.standard_normal(3_000_000).astype(np.float32))
    size = tensor.size_in_bytes
    moves = (
        Literal(0, b"head"),
        Copy(4, size, tensor.chunks[0].extent.file, 0),
        Literal(4 + size, b"\0\0\0\0tail\0\0\0\0"),
    )
    seals = (Seal(4 + size, 4, 4 + size), Seal(12 + size, 0, 12 + size))
    run_plan(plan(tmp_path, PlannedFile("m", 16 + size, moves, seals)), tmp_path / "out", Settings(jobs=4), ignore)
    data = (tmp_path / "out" / "m").read_bytes()
    inner = zlib.crc32(data[4 : 4 + size]).to_bytes(4, "little")
    assert data[4 : 4 + size] == (tmp_path / "a").read_bytes()
    assert data[4 + size :] == inner + b"tail" + zlib.crc32(data[: 12 + size]).to_bytes(4, "little")


def test_progress_adds_up(tmp_path: Path, doubled: str) -> None:
    events: list[Event] = []
    todo, _ = every_move(tmp_path, doubled)
    run_plan(todo, tmp_path / "out", SMALL, events.append)
    assert events[0] == PhaseStarted("write", todo.size)
    assert isinstance(events[-1], PhaseFinished)
    assert sum(event.size for event in events if isinstance(event, Advanced)) == todo.size


def test_progress_is_told_seldom(tmp_path: Path) -> None:
    write_array(tmp_path, "a", np.zeros(20_000, np.uint8))
    events: list[Event] = []
    todo = plan(tmp_path, copied_file("m", [("a", at, 1) for at in range(20_000)]))
    run_plan(todo, tmp_path / "out", SMALL, events.append)
    (seconds,) = [event.seconds for event in events if isinstance(event, PhaseFinished)]
    assert sum(isinstance(event, Advanced) for event in events) <= 2 + seconds * 100


@pytest.mark.parametrize("lost", [True, False])
def test_a_source_that_is_gone_or_cut_short_leaves_nothing(tmp_path: Path, doubled: str, lost: bool) -> None:
    todo, _ = every_move(tmp_path, doubled)
    if lost:
        (tmp_path / "b").unlink()
    else:
        os.truncate(tmp_path / "b", 1000)
    with pytest.raises(FormatError, match=r"/b: (cannot be opened|ends at byte)"):
        run_plan(todo, tmp_path / "out", SMALL, ignore)
    assert not (tmp_path / "out").exists()


def test_encoded_data_that_is_damaged_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "z").write_bytes(b"\0" * 8)
    chunk = write_array(tmp_path, "w", np.zeros(8, np.uint8)).chunks[0]
    encoded = Chunk(chunk.box, Extent(SourceFile(ROOT, "z", Encoded("zstd", 0, 8, 8)), 0, (1,), U8))
    todo = plan(tmp_path, PlannedFile("m", 8, (Tile(0, U8, (8,), (encoded,), "w"),)))
    with pytest.raises(FormatError, match="z: the item at byte 0: no zstd stream: a frame begins with 00 00 00 00"):
        run_plan(todo, tmp_path / "out", SMALL, ignore)
    assert not (tmp_path / "out").exists()


def test_copying_loads_no_numpy(tmp_path: Path) -> None:
    """A plan of copies and short row shards starts at once: numpy takes as long to load as a small model to copy."""
    (tmp_path / "a").write_bytes(b"x" * 100 + b"y" * 60)
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from unshard.dtypes import F32
from unshard.plan.moves import Copy, Plan, PlannedFile, Tile
from unshard.report.events import ignore
from unshard.run.local import run_plan
from unshard.settings import Settings
from unshard.tensors import Box, Chunk, Encoded, Extent, SourceFile
file = SourceFile("source", "a")
pieces = [Chunk(Box((row, 0), (1, 5)), Extent(file, 100 + 20 * row, (20, 4), F32)) for row in range(3)]
moves = (Copy(0, 100, file, 0), Tile(100, F32, (3, 5), tuple(pieces), "bias"))
run_plan(Plan({{"source": Path({str(tmp_path)!r})}}, (PlannedFile("m", 160, moves),)), Path({str(tmp_path)!r}) / "out",
         Settings(), ignore)
assert "numpy" not in sys.modules
"""
    assert os.spawnv(os.P_WAIT, os.sys.executable, [os.sys.executable, "-c", script]) == 0
    assert (tmp_path / "out" / "m").read_bytes() == b"x" * 100 + b"y" * 60


def test_a_budget_admits_the_first_whatever_its_size() -> None:
    budget = Budget(100)
    admitted = threading.Event()

    def second() -> None:
        with budget.reserve(1):
            admitted.set()

    thread = threading.Thread(target=second)
    with budget.reserve(1000):
        thread.start()
        assert not admitted.wait(0.05)
    thread.join()
    assert admitted.is_set()
    with budget.reserve(60), budget.reserve(40):
        pass
