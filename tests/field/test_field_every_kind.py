"""Faults from the field in what is written, tried with every kind: torch's DCP and shards, accelerate, DeepSpeed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from field_cases import copy_case, edit_json, merge, refuse, same, truth, warnings

import dcp_bytes as db
import hf_shard_bytes as hb
import torch_bytes as opcodes
import unshard
from fsdp_bytes import Array, numbers, write_archive
from golden.tensor_files import read_tensors
from unshard.cli import main
from unshard.errors import FormatError, ModelError

KINDS = [
    "accelerate_fsdp2", "accelerate_fsdp2_ranks", "dcp_fsdp2", "dcp_rank_metadata", "deepspeed_autotp_tp2",
    "deepspeed_pipeline_pp2", "deepspeed_z0_bf16", "deepspeed_z2_bf16", "deepspeed_z3_bf16", "hf_shards_w2",
    "hf_shards_whole",
]  # fmt: skip
HEADERS = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
CONFIGS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@pytest.mark.parametrize("case", KINDS)
def test_success_is_said_where_a_model_lies(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """torchtitan#307, NeMo-RL#491: "Converting…", exit code 0, and no file, or a torch file to be converted again."""
    source, output = copy_case(case, tmp_path / "run"), tmp_path / "out"
    assert main(["merge", str(source), str(output)]) == 0
    assert str(output) in "".join(capsys.readouterr())
    assert read_tensors(output) == truth(case)
    assert {path.suffix for path in output.iterdir()} <= {".safetensors", ".json", ".jinja"}
    assert main(["verify", str(output), "--against", str(source)]) == 0


@pytest.mark.parametrize("case", KINDS)
def test_shards_have_an_index_of_their_true_size(case: str, tmp_path: Path) -> None:
    """torchtitan#2137, exo#1956, accelerate's `merge_fsdp_weights`: shards without an index, or one file of 100 GB."""
    expected = truth(case)
    size = sum(len(tensor.data) for tensor in expected.values())
    _, found = merge(copy_case(case, tmp_path / "run"), tmp_path / "out", max_shard_size=size // 4)
    assert found == expected
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = {path.name for path in (tmp_path / "out").glob("*.safetensors")}
    assert len(files) > 2
    assert set(index["weight_map"].values()) == files
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == size


@pytest.mark.parametrize("dtype", HEADERS)
@pytest.mark.parametrize("case", KINDS)
def test_dtype_that_was_asked_for_is_in_the_files(case: str, dtype: str, tmp_path: Path) -> None:
    """torchtitan#2041, torchtitan#4166, DeepSpeed#8378: the log said fp32, and the file was bf16, or the reverse."""
    _, found = merge(copy_case(case, tmp_path / "run"), tmp_path / "out", dtype=dtype)
    assert {tensor.dtype for tensor in found.values()} == {HEADERS[dtype]}
    assert {len(t.data) for t in found.values()} == {
        np.prod(t.shape) * (4 if dtype == "fp32" else 2) for t in found.values()
    }
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert {config[key] for key in ("dtype", "torch_dtype") if key in config} <= {CONFIGS[dtype]}


@pytest.mark.parametrize(("layers", "kind"), [(1, "missing"), (-1, "unknown")])
@pytest.mark.parametrize("case", KINDS)
def test_parameters_that_do_not_match_the_model_are_all_told(case: str, layers: int, kind: str, tmp_path: Path) -> None:
    """speculators#1131, EasyR1#299: unmatched keys were passed over, and random weights saved in their place."""
    source = copy_case(case, tmp_path / "run")
    config = next(iter(sorted(source.rglob("config.json"))))
    there = json.loads(config.read_text())["num_hidden_layers"]
    edit_json(config, num_hidden_layers=there + layers, layer_types=None, max_window_layers=there + layers)
    error = refuse(source, tmp_path / "out")
    assert isinstance(error, ModelError)
    assert kind in error.message
    first = "model.layers.0."
    names = [name.removeprefix(first) for name in truth(case) if name.startswith(first)]
    told = error.message.replace("[", "").replace("]", "")
    wanted = f"model.layers.{max(there, there + layers) - 1}."
    assert len(names) > 8
    assert [name for name in names if wanted + name not in told] == []


@pytest.mark.parametrize("kind", ["model", "DCP", "shards"])
def test_flat_parameter_under_the_name_of_a_whole_one_is_refused(kind: str, tmp_path: Path) -> None:
    """transformers#34080: "size mismatch for model.embed_tokens.weight: … torch.Size([65667584])" in the loader."""
    source = copy_case("hf_shards_w2", tmp_path / "source", "truth")
    arrays = {key: np.frombuffer(t.data, "<f4").reshape(t.shape) for key, t in truth("hf_shards_w2").items()}
    arrays["model.embed_tokens.weight"] = arrays["model.embed_tokens.weight"].reshape(-1).copy()
    (source / "model.safetensors").unlink()
    if kind == "model":
        write_safetensors(source / "model.safetensors", arrays)
    elif kind == "DCP":
        db.save(source, {"model": arrays})
    else:
        hb.write_ranks(source, arrays, 2)
    error = refuse(source, tmp_path / "out")
    assert "model.embed_tokens.weight" in error.message
    assert "[232]" in error.message
    assert "[29, 8]" in error.message


def write_safetensors(path: Path, arrays: Mapping[str, Array]) -> None:
    """A whole model of fp32."""
    header, data = {}, b""
    for name, array in arrays.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + array.nbytes],
        }
        data += array.tobytes()
    hb.write_file(path, header, data)


@pytest.mark.parametrize("left", [0, 7, 100, -1])
def test_truncated_consolidation_is_refused_and_its_shards_are_the_way_out(left: int, tmp_path: Path) -> None:
    """NeMo-RL#3624: a barrier timed out, and truncated files lay under their final names."""
    source = copy_case("hf_shards_consolidated", tmp_path / "run")
    model = source / "model-00001-of-00001.safetensors"
    os.truncate(model, left % model.stat().st_size)
    error = refuse(source, tmp_path / "out")
    assert isinstance(error, FormatError)
    assert model.name in error.message
    assert f"unshard merge {source / 'sharded'} OUT" in str(error.hint)
    assert merge(source / "sharded", tmp_path / "out", config=source)[1] == truth("hf_shards_consolidated")


STAGES = [
    {"embed.weight": numbers(6, 4), "layers.0.weight": numbers(4, 4, start=100)},
    {"layers.1.weight": numbers(4, 4, start=200), "head.weight": numbers(6, 4, start=300)},
]
"""The parameters of two pipeline stages, each on one rank."""


@pytest.mark.parametrize("kind", ["DCP", "shards"])
def test_each_stage_of_a_pipeline_may_have_names_of_its_own(kind: str, tmp_path: Path) -> None:
    """Automodel#3248: rank 0 failed on keys of another stage; the others said `Connection closed by peer`."""
    if kind == "DCP":
        writer = db.Writer(tmp_path / "ckpt")
        for rank, stage in enumerate(STAGES):
            for name, array in stage.items():
                writer.declare(name, array.shape)
                writer.write(name, (0, 0), array, f"__{rank}_0.distcp")
        source = writer.finish()
        lost = source / "__1_0.distcp"
    else:
        source = tmp_path / "ckpt"
        for rank, stage in enumerate(STAGES, 1):
            lost = hb.write_shard(source, rank, {name: ((0, 0), array) for name, array in stage.items()})
    assert same(merge(source, tmp_path / "out", weights_only=True)[1], STAGES[0] | STAGES[1])
    lost.unlink()
    if kind == "DCP":
        assert lost.name in refuse(source, tmp_path / "no", weights_only=True).message
    else:
        report = merge(source, tmp_path / "part", weights_only=True)[0]
        assert "that no shard is missing behind the last one could not be proven" in warnings(report)


def test_names_of_a_missing_stage_are_told_by_the_model(tmp_path: Path) -> None:
    """The same, where a config tells the names: they are all missing, and nothing is written."""
    arrays = {key: np.frombuffer(t.data, "<f4").reshape(t.shape) for key, t in truth("hf_shards_w2").items()}
    held = {name: array for name, array in arrays.items() if name.startswith(("model.embed", "model.layers"))}
    hb.write_shard(tmp_path / "ckpt", 1, {name: ((0,) * array.ndim, array) for name, array in held.items()})
    error = refuse(tmp_path / "ckpt", tmp_path / "out", config=copy_case("hf_shards_w2", tmp_path / "hf", "truth"))
    assert [name for name in arrays.keys() - held.keys() if name not in error.message] == []


HOSTILE = ["accelerate_fsdp2_ranks", "dcp_rank_metadata", "dcp_zstd", "deepspeed_moe_ep2_w4",
           "deepspeed_pipeline_pp2", "deepspeed_z3_universal"]  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_no_file_of_a_checkpoint_is_unpickled(case: str, tmp_path: Path) -> None:
    """DeepSpeed#6751, Megatron-Bridge#3138, transformers#43140: `weights_only=False`, in any of a dozen files."""
    mark = tmp_path / "mark"
    attack = opcodes.call(opcodes.named("os", "system"), opcodes.text(f"touch {mark}"))
    golden = copy_case(case, tmp_path / "golden")
    files = [path.relative_to(golden) for path in golden.rglob("*") if path.suffix not in (".json", ".jinja", ".py")]
    files = [file for file in files if (golden / file).is_file() and file.name != "latest"]
    assert len(files) > 2
    for number, file in enumerate(sorted(files)):
        source = copy_case(case, tmp_path / f"run{number}")
        if file.name.endswith((".metadata", ".pkl")):
            (source / file).write_bytes(opcodes.finish(attack))
        else:
            write_archive(source / file, {"data.pkl": opcodes.finish(attack), "version": b"3\n"})
        for weights in ("master", "model"):
            _try_merge(source, tmp_path / f"{weights}{number}", weights_only=True, weights=weights)
        assert not mark.exists(), file


def _try_merge(source: Path, output: Path, **options: Any) -> None:
    """Merge, or be refused by an error of ours, with nothing written."""
    try:
        unshard.merge(source, output, **options)
    except unshard.UnshardError:
        assert not output.exists()
