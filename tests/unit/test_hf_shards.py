"""Shards of torch's HuggingFaceStorageWriter: what is read, and what is proven of them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assembled import gather
from format_contract import check_format
from hf_shard_bytes import cut_rows, write_file, write_ranks, write_shard
from unshard.checkpoint import Checkpoint, Shape
from unshard.errors import FormatError, UnshardError
from unshard.formats.contract import Source
from unshard.formats.hf_shards import HfShards
from unshard.formats.hf_shards.file_names import find_shards_near, parse_shard
from unshard.formats.hf_shards.sharding_info import parse_sharding_info
from unshard.formats.hf_shards.tiling import find_flaw
from unshard.locate import locate
from unshard.plan.coverage import prove_coverage
from unshard.tensors import Box

MATRIX = np.arange(70, dtype=np.float32).reshape(10, 7)
VECTOR = np.arange(5, dtype=np.float32)
MODEL = {"a.weight": MATRIX, "a.bias": VECTOR, "a.scale": np.float32(3).reshape(())}
SHAPES = {name: array.shape for name, array in MODEL.items()}


def read(directory: Path, shapes: Mapping[str, Shape] | None = None, **options: Any) -> Checkpoint:
    def told(_config: object, names: Collection[str]) -> Mapping[str, Shape] | None:
        return None if shapes is None else {**shapes}

    return HfShards().read(Source(directory, named_shapes=told, **options))


def messages(checkpoint: Checkpoint) -> str:
    return "\n".join(str(problem) for problem in checkpoint.problems)


def assert_whole(checkpoint: Checkpoint, tensors: Mapping[str, Any] = MODEL) -> None:
    assert checkpoint.problems == ()
    assert sorted(checkpoint.tensors) == sorted(tensors)
    for name, array in tensors.items():
        tensor = checkpoint.tensors[name]
        assert prove_coverage(tensor) == []
        assert tensor.shape == array.shape
        assert gather(tensor, checkpoint.roots) == array.tobytes()


# What is read ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8, 16])
def test_rows_of_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    write_ranks(tmp_path, MODEL, ranks)
    found = read(tmp_path, SHAPES)
    assert_whole(found)
    assert (found.world_size, found.notes) == (ranks, ())
    assert found.title == f"torch's safetensors shards, {ranks} rank{'s' if ranks > 1 else ''}"


def test_it_keeps_what_every_format_promises(tmp_path: Path) -> None:
    write_ranks(tmp_path / "ckpt", MODEL, 3)
    check_format(HfShards(), tmp_path / "ckpt", tmp_path)


def test_blocks_of_two_axes_and_replicas(tmp_path: Path) -> None:
    for rank in range(8):
        row, column = rank // 2 % 2 * 5, rank % 2 * 4
        block = ((row, column), MATRIX[row : row + 5, column : column + 4])
        write_shard(tmp_path, rank + 1, {"w.weight": block, "norm.weight": ((0,), VECTOR)})
    found = read(tmp_path, {"w.weight": (10, 7), "norm.weight": (5,)})
    assert_whole(found, {"w.weight": MATRIX, "norm.weight": VECTOR})
    assert [chunk.rank for chunk in found.tensors["norm.weight"].chunks] == list(range(8))


def test_several_files_of_a_rank(tmp_path: Path) -> None:
    for rank in range(2):
        write_shard(tmp_path, rank + 1, {"w.weight": cut_rows(MATRIX, 2, rank)}, file=1, count=2)
    write_shard(tmp_path, 1, {"norm.weight": ((0,), VECTOR)}, file=2, count=2)
    found = read(tmp_path, {"w.weight": (10, 7), "norm.weight": (5,)})
    assert_whole(found, {"w.weight": MATRIX, "norm.weight": VECTOR})
    assert found.title == "torch's safetensors shards, 2 ranks, 3 files"


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "U8", "I8", "BOOL"])
def test_types_that_torch_itself_cannot_put_together(tmp_path: Path, dtype: str) -> None:
    array = (np.arange(30, dtype=np.uint8) % 2).reshape(6, 5)
    for rank in range(2):
        write_shard(tmp_path, rank + 1, {"w.weight": cut_rows(array, 2, rank)}, dtypes={"w.weight": dtype})
    found = read(tmp_path, {"w.weight": (6, 5)})
    assert found.problems == ()
    assert found.tensors["w.weight"].dtype.name == dtype
    assert gather(found.tensors["w.weight"], found.roots) == array.tobytes()


def test_a_tensor_without_elements(tmp_path: Path) -> None:
    write_shard(tmp_path, 1, {"w.weight": ((0, 0), MATRIX), "e.weight": ((0, 0), np.zeros((0, 3), np.float32))})
    assert_whole(read(tmp_path), {"w.weight": MATRIX, "e.weight": np.zeros((0, 3), np.float32)})


def test_states_beside_the_model_are_left_out(tmp_path: Path) -> None:
    parts = {f"model.model.{name}": ((0,) * array.ndim, array) for name, array in MODEL.items()}
    write_shard(tmp_path, 1, {**parts, "optimizer.state.a.bias.exp_avg": ((0,), VECTOR)})
    found = read(tmp_path)
    assert sorted(found.tensors) == sorted(f"model.{name}" for name in MODEL)
    assert any("optimizer states: 1 tensor" in note.text for note in found.notes)


def test_shards_on_several_nodes(tmp_path: Path) -> None:
    write_ranks(tmp_path / "run/step-5/sharded", MODEL, 2)
    (tmp_path / "node1/step-5/sharded").mkdir(parents=True)
    name = "shard-00002-model-00001-of-00001.safetensors"
    (tmp_path / "run/step-5/sharded" / name).rename(tmp_path / "node1/step-5/sharded" / name)
    found = read(tmp_path / "run/step-5/sharded", SHAPES, also=(tmp_path / "node1",))
    assert_whole(found)
    (tmp_path / "none").mkdir()
    nowhere = read(tmp_path / "run/step-5/sharded", SHAPES, also=(tmp_path / "none",))
    assert f"{tmp_path}/none: no shard of torch's HuggingFaceStorageWriter lies here" in messages(nowhere)


def test_config_and_tokenizer_lie_beside_or_above(tmp_path: Path) -> None:
    write_ranks(tmp_path / "step/sharded", MODEL, 2)
    (tmp_path / "step/config.json").write_text('{"model_type": "x"}')
    (tmp_path / "step/tokenizer.json").write_text("{}")
    found = read(tmp_path / "step/sharded")
    assert found.config == {"model_type": "x"}
    assert [asset.path for asset in found.assets] == ["config.json", "tokenizer.json"]


def test_the_side_files_of_nemo_automodel(tmp_path: Path) -> None:
    """NVIDIA-NeMo/Automodel, `components/checkpoint/checkpointing.py`: they wait for the consolidation."""
    write_ranks(tmp_path / "model", MODEL, 2)
    (tmp_path / "model/.hf_metadata").mkdir()
    (tmp_path / "model/.hf_metadata/config.json").write_text('{"model_type": "x"}')
    assert read(tmp_path / "model").config == {"model_type": "x"}


def test_a_file_stands_for_its_directory(tmp_path: Path) -> None:
    write_ranks(tmp_path, MODEL, 2)
    found, place = locate(tmp_path / "shard-00002-model-00001-of-00001.safetensors")
    assert (found.name, place) == ("hf_shards", tmp_path)


def test_models_of_torchtitan_are_told(tmp_path: Path) -> None:
    write_shard(tmp_path, 1, {"layers.0.attention.wq.weight": ((0, 0), MATRIX)})
    assert read(tmp_path).dialect == "torchtitan"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("shard-00003-model-00001-of-00002.safetensors", (3, 1, 2)),
        ("shard-123456-model-00001-of-00002.safetensors", (123456, 1, 2)),
        ("model-00001-of-00002.safetensors", None),
        ("shard-00003-model-00001-of-00002.safetensors.tmp", None),
        ("xshard-00003-model-00001-of-00002.safetensors", None),
    ],
)
def test_names(name: str, found: tuple[int, int, int] | None) -> None:
    shard = parse_shard(name)
    assert (shard and (shard.shard, shard.file, shard.count)) == found
    assert shard is None or str(shard) == name


# What is proven -------------------------------------------------------------------------------------------------------


def test_a_missing_last_shard_is_an_error_where_the_shapes_are_known(tmp_path: Path) -> None:
    write_ranks(tmp_path, MODEL, 5)
    (tmp_path / "shard-00005-model-00001-of-00001.safetensors").unlink()
    found = messages(read(tmp_path, SHAPES))
    assert "a.weight: found [8, 7], expected [10, 7]" in found
    assert "a.bias: found [4], expected [5]" in found
    assert "missing: shards after number 4" in found
    assert "--also DIR" in found


def test_a_missing_last_shard_cannot_be_told_otherwise_and_that_is_said(tmp_path: Path) -> None:
    write_ranks(tmp_path, MODEL, 5)
    (tmp_path / "shard-00005-model-00001-of-00001.safetensors").unlink()
    found = read(tmp_path)
    assert found.problems == ()
    (note,) = found.notes
    assert note.level == "warning"
    assert "neither a config of a known family nor --shapes-from tells the shapes" in note.text


def test_an_empty_piece_tells_where_its_tensor_ends(tmp_path: Path) -> None:
    """Of 5 elements on 4 ranks, the last has none, and begins where the third ends."""
    write_ranks(tmp_path, {"a.bias": VECTOR}, 4)
    (tmp_path / "shard-00003-model-00001-of-00001.safetensors").unlink()
    assert "holes in 1 tensor, for these are missing: shard 3\n  a.bias: [4:5]" in messages(read(tmp_path))


def test_tensors_that_nothing_tells_the_shapes_of(tmp_path: Path) -> None:
    write_ranks(tmp_path, {**MODEL, "own.weight": VECTOR}, 2)
    found = read(tmp_path, SHAPES)
    assert found.problems == ()
    (note,) = found.notes
    assert (note.level, note.tensors) == ("warning", ("own.weight",))


@pytest.mark.parametrize("shapes", [None, SHAPES])
def test_a_gap_in_the_numbers(tmp_path: Path, shapes: Mapping[str, Shape] | None) -> None:
    write_ranks(tmp_path, MODEL, 5)
    (tmp_path / "shard-00002-model-00001-of-00001.safetensors").unlink()
    found = messages(read(tmp_path, shapes))
    assert "holes in 2 tensors, for these are missing: shard 2\n" in found
    assert "a.weight: [2:4, 0:7]" in found


def test_a_gap_may_be_the_end_of_a_tensor(tmp_path: Path) -> None:
    """Shards 3 and 4 write another tensor: behind which of these the first one goes on, nothing tells."""
    for rank in range(2):
        write_shard(tmp_path, rank + 1, {"a.weight": cut_rows(MATRIX, 2, rank)})
        write_shard(tmp_path, rank + 3, {"a.bias": cut_rows(VECTOR, 2, rank)})
    (tmp_path / "shard-00002-model-00001-of-00001.safetensors").unlink()
    assert "must be missing: shard 2, or shards after number 4\n" in messages(read(tmp_path, SHAPES))


def test_a_gap_that_holds_nothing_is_no_error_where_that_is_proven(tmp_path: Path) -> None:
    """Where replicas lie on neighbouring ranks and the lowest of them writes, every other rank has nothing to write."""
    for rank in range(2):
        write_shard(tmp_path, 2 * rank + 1, {"a.weight": cut_rows(MATRIX, 2, rank)})
    assert "missing: shard 2" in messages(read(tmp_path))
    assert "--shapes-from DIR" in messages(read(tmp_path))
    found = read(tmp_path, {"a.weight": (10, 7)})
    assert_whole(found, {"a.weight": MATRIX})
    assert found.notes[-1].text.startswith("missing: shard 2; but nothing of the model")
    assert "missing: shard 2" in messages(read(tmp_path, {"a.weight": (10, 7), "b.weight": (1,)}))


def test_a_file_that_every_rank_lacks(tmp_path: Path) -> None:
    for rank in range(2):
        write_shard(tmp_path, rank + 1, {"a.weight": cut_rows(MATRIX, 2, rank)}, file=1, count=3)
    assert "missing: files 2-3 of every shard" in messages(read(tmp_path))


def test_a_file_that_one_rank_lacks(tmp_path: Path) -> None:
    for rank in range(3):
        for file, name in enumerate(("a.weight", "b.weight"), 1):
            write_shard(tmp_path, rank + 1, {name: cut_rows(MATRIX, 3, rank)}, file=file, count=2)
    (tmp_path / "shard-00002-model-00002-of-00002.safetensors").unlink()
    assert "for these are missing: shard-00002-model-00002-of-00002.safetensors" in messages(read(tmp_path))
    (tmp_path / "shard-00003-model-00002-of-00002.safetensors").unlink()
    found = messages(read(tmp_path, {"a.weight": (10, 7), "b.weight": (10, 7)}))
    assert "b.weight: found [4, 7], expected [10, 7]" in found
    assert "missing: shard-00002-model-00002-of-00002.safetensors, shard-00003-model-00002" in found


def test_parameters_that_no_shard_holds(tmp_path: Path) -> None:
    write_ranks(tmp_path, MODEL, 2)
    found = read(tmp_path, {**SHAPES, "b.weight": (3,)})
    assert [note.tensors for note in found.notes] == [("b.weight",)]
    write_ranks(tmp_path, {**MODEL, "a.lora_A.default.weight": VECTOR}, 2)
    assert all("b.weight" not in note.tensors for note in read(tmp_path, {**SHAPES, "b.weight": (3,)}).notes)


def test_a_larger_tensor_than_expected_is_left_to_naming(tmp_path: Path) -> None:
    write_ranks(tmp_path, MODEL, 2)
    assert read(tmp_path, {**SHAPES, "a.weight": (8, 7), "a.bias": (5, 1)}).tensors["a.weight"].shape == (10, 7)


def test_saves_of_two_worlds(tmp_path: Path) -> None:
    write_ranks(tmp_path, MODEL, 5)
    write_ranks(tmp_path, MODEL, 2)
    found = messages(read(tmp_path, SHAPES))
    assert "shards of several saves lie here: pieces of 2 tensors overlap; 1-2 fit together without 3-5" in found


def test_saves_with_different_numbers_of_files(tmp_path: Path) -> None:
    write_ranks(tmp_path, MODEL, 2)
    write_shard(tmp_path, 1, {"a.bias": ((0,), VECTOR)}, file=2, count=2)
    found = messages(read(tmp_path, SHAPES))
    assert "shards of 2 saves lie here" in found
    assert "2 files of -of-00001, 1 file of -of-00002" in found


def test_uneven_pieces_of_which_torch_records_wrong_places(tmp_path: Path) -> None:
    """7 rows on 3 x 2 ranks, FSDP2 above tensor parallelism, as torch 2.13 records them."""
    rows = np.arange(21, dtype=np.float32).reshape(7, 3)
    recorded = ((0, 0, 2), (4, 4, 5), (2, 2, 4), (5, 5, 6), (6, 4, 4), (7, 6, 7))
    for rank, (offset, start, stop) in enumerate(recorded):
        write_shard(tmp_path, rank + 1, {"w.weight": ((offset, 0), rows[start:stop])})
    for shapes in (None, {"w.weight": (7, 3)}):
        found = read(tmp_path, shapes)
        assert_whole(found, {"w.weight": rows})
        assert found.notes[0].tensors == ("w.weight",)
    (tmp_path / "shard-00006-model-00001-of-00001.safetensors").unlink()
    assert "w.weight: found [6, 3], expected [7, 3]" in messages(read(tmp_path, {"w.weight": (7, 3)}))


# What is damaged ------------------------------------------------------------------------------------------------------

INFO = json.dumps({"a.bias": {"saved_offsets": [0]}})


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ("{}", "has no place for 1 tensors of the file: `a.bias`"),
        ('{"a.bias": {"saved_offsets": [0, 0]}}', "not as many offsets as axes"),
        (
            '{"a.bias": {"saved_offsets": [0]}, "b": {"saved_offsets": [0]}}',
            "tells of 1 tensors that the file does not",
        ),
        ('{"a.bias": {"saved_offsets": [-1]}}', "no saved_offsets of 'a.bias'"),
        ('{"a.bias": {"saved_offsets": [true]}}', "no saved_offsets"),
        ('{"a.bias": {"saved_offsets": [1e3]}}', "no saved_offsets"),
        ('{"a.bias": {"saved_offsets": [9999999999999999999999]}}', "no saved_offsets"),
        ('{"a.bias": {}}', "no saved_offsets"),
        ('{"a.bias": []}', "no saved_offsets"),
        ("[]", "is malformed"),
        ('{"a.bias": {"saved_offsets": [0]}', "is malformed"),
        ('{"a.bias": ' + "[" * 5000, "is malformed"),
        (INFO[:-1] + "," + INFO[1:], "a name that appears twice"),
        ("", "is malformed"),
    ],
)
def test_malformed_sharding_info(tmp_path: Path, info: str, words: str) -> None:
    write_shard(tmp_path, 1, {"a.weight": ((0, 0), MATRIX)})
    damaged = write_shard(tmp_path, 2, {"a.bias": ((0,), VECTOR)}, info=info)
    found = read(tmp_path)
    (problem,) = found.problems
    assert isinstance(problem, FormatError)
    assert str(damaged) in problem.message
    assert words in problem.message
    assert list(found.tensors) == ["a.weight"]


def test_a_file_of_another_writer_under_the_name_of_a_shard(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]}
    write_file(tmp_path / "shard-00001-model-00001-of-00001.safetensors", {"a": entry}, VECTOR.tobytes())
    with pytest.raises(UnshardError, match="have no DCP_SHARDING_INFO"):
        read(tmp_path)


@pytest.mark.parametrize(
    "other", [((5, 0), MATRIX[5:].astype(np.float64)), ((5,), VECTOR)], ids=["another type", "another number of axes"]
)
def test_pieces_that_are_not_of_one_tensor(tmp_path: Path, other: Any) -> None:
    write_shard(tmp_path, 1, {"a.weight": ((0, 0), MATRIX[:5])})
    write_shard(tmp_path, 2, {"a.weight": other})
    found = messages(read(tmp_path))
    assert "the shards do not agree on 1 tensor" in found
    assert "a.weight: F32 of 2 axes in shard-00001-model-00001-of-00001.safetensors, F" in found


def test_offsets_far_beyond_the_tensor(tmp_path: Path) -> None:
    write_shard(tmp_path, 1, {"a.weight": ((0, 0), MATRIX[:5])})
    write_shard(tmp_path, 2, {"a.weight": ((1 << 60, 0), MATRIX[5:])})
    assert "holes in 1 tensor" in messages(read(tmp_path))
    assert "holes in 1 tensor" in messages(read(tmp_path, {"a.weight": (10, 7)}))


def test_numbers_of_shards_that_nobody_has(tmp_path: Path) -> None:
    write_shard(tmp_path, 999_999_999, {"a.weight": ((0, 0), MATRIX)})
    assert "missing: shards 1-999999" in messages(read(tmp_path))


def test_offsets_are_read() -> None:
    assert parse_sharding_info('{"a": {"saved_offsets": []}, "b": {"saved_offsets": [1, 2], "new": 3}}') == {
        "a": (),
        "b": (1, 2),
    }


@pytest.mark.parametrize(
    ("boxes", "flaw"),
    [
        ([((0, 0), (4, 6))], None),
        ([((0, 0), (4, 2)), ((0, 2), (4, 4))], None),
        ([((0, 0), (4, 2)), ((0, 3), (4, 3))], ("hole", "[0:4, 2:3]")),
        ([((0, 0), (4, 4)), ((0, 2), (4, 4))], ("overlap", "[0:4, 2:4]")),
        ([((0, 0), (4, 2))], ("hole", "[0:4, 2:6]")),
        ([((0, 0), (2, 3)), ((0, 3), (2, 3)), ((2, 0), (2, 3))], ("hole", "18 elements of 24")),
        ([((0, 0), (3, 5)), ((0, 1), (4, 5))], ("overlap", "35 elements of 24")),
        ([((0, 0), (4, 7))], ("outside", "[0:4, 0:7] in shape [4, 6]")),
        ([], ("hole", "0 elements of 24")),
    ],
)
def test_flaws(boxes: Any, flaw: tuple[str, str] | None) -> None:
    found = find_flaw((4, 6), [Box(*box) for box in boxes])
    assert (found and (found.kind, found.where)) == flaw


# Beside a model that torch put together -------------------------------------------------------------------------------


def test_where_the_shards_of_a_consolidated_model_lie(tmp_path: Path) -> None:
    write_ranks(tmp_path / "step/sharded", MODEL, 2)
    write_ranks(tmp_path / "model", MODEL, 2)
    (tmp_path / "model/consolidated").mkdir()
    assert find_shards_near(tmp_path / "step") == tmp_path / "step/sharded"
    assert find_shards_near(tmp_path / "model/consolidated") == tmp_path / "model"
    assert find_shards_near(tmp_path / "model") is None
