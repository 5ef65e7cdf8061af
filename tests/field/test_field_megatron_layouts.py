"""Faults from the field in finding and opening Megatron's checkpoints: layouts, versions, classes, surroundings."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from field_cases import copy_case, edit_json, merge, refuse, same, truth, warnings, words

import dcp_bytes
import torch_bytes as opcodes
import unshard
from commands import run
from fsdp_bytes import record, write_json
from golden_set import COMMITTED
from megatron_bytes import FILE, Decoder, namespace, write_legacy
from unshard.errors import IncompleteError
from unshard.opening import open_checkpoint

DIST = "megatron_dist_tp2"
LEGACY = "megatron_legacy_tp2pp2"
ITERATION = "iter_0000010"


def config_of(case: str) -> Path:
    """The directory with config and tokenizer of a golden case of Megatron."""
    return COMMITTED / case / "hf"


@pytest.mark.parametrize("case", [DIST, LEGACY])
@pytest.mark.parametrize("level", [".", ITERATION, "a piece"])
def test_format_and_iteration_are_found_from_every_level(level: str, case: str, tmp_path: Path) -> None:
    """Megatron-LM#1291, #1317, #919: the loader exits, "dist files not found": wrong level, wrong `--ckpt-format`."""
    source = copy_case(case, tmp_path / "run")
    shutil.copytree(source / ITERATION, source / "iter_0000005")
    piece = "common.pt" if case == DIST else "mp_rank_01_001"
    report, found = merge(source / (f"{ITERATION}/{piece}" if level == "a piece" else level), tmp_path / "out",
                          config=config_of(case))  # fmt: skip
    assert found == truth(case)
    assert "iteration 10" in report.checkpoint


def test_run_that_was_released_by_a_converter_is_found(tmp_path: Path) -> None:
    """Megatron-LM#919: the tracker says `release`, which is no iteration."""
    source = copy_case(LEGACY, tmp_path / "run")
    (source / ITERATION).rename(source / "release")
    (source / "latest_checkpointed_iteration.txt").write_text("release")
    assert merge(source, tmp_path / "out", config=config_of(LEGACY))[1] == truth(LEGACY)


@pytest.mark.parametrize("layout", ["dist_ckpt", "model/dist_ckpt"])
def test_both_of_verls_layouts_are_read_and_a_missing_manifest_is_said(layout: str, tmp_path: Path) -> None:
    """verl#6014: a new tree, whose manifest is written last: without it, the save may have been cut short."""
    place = tmp_path / "run" / "global_step_10" / "actor"
    shutil.copytree(COMMITTED / DIST / "ckpt" / ITERATION, place / layout)
    shutil.copytree(config_of(DIST), (place / layout).parent / "huggingface")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("10")
    report, found = merge(tmp_path / "run", tmp_path / "out", backend="megatron")
    assert found == truth(DIST)
    if layout == "dist_ckpt":
        assert warnings(report) == ""
        return
    assert "ckpt_contents.json is missing" in warnings(report)
    write_json(place / "ckpt_contents.json", {"contents": {"model": {"path": "model/dist_ckpt"}}})
    assert warnings(merge(place, tmp_path / "sealed")[0]) == ""
    (place / "ckpt_contents.json").write_text("{")
    assert "ckpt_contents.json" in refuse(place, tmp_path / "malformed").message


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("role", ["huggingface", "hf"])
def test_generation_config_beside_megatrons_weights_is_copied_byte_for_byte(
    role: str, name: str, tmp_path: Path
) -> None:
    """verl#7198: the EOS list was lost again on the Megatron path, and a malformed file was taken for an absent one."""
    content = b'{ "eos_token_id": [3, 4],\n  "pad_token_id": 0 }\n'
    source = write_legacy(tmp_path / "run", Decoder(), tp=2)
    (source / "hf").rename(source / role)
    (source / role / name).write_bytes(content)
    merge(source, tmp_path / "out")
    assert (tmp_path / "out" / name).read_bytes() == content
    if name == "generation_config.json":
        (source / role / name).write_bytes(content[:20])
        assert name in refuse(source, tmp_path / "malformed").message


@pytest.mark.parametrize("case", ["megatron_legacy_tp2pp2ep2", "megatron_dist_tp2ep2etp1", LEGACY])
def test_extra_states_are_left_out_and_counted(case: str, tmp_path: Path) -> None:
    """Megatron-LM#900, RLinf#266, NeMo Speech#12298: `_extra_state` that is unexpected, or missing, ends the load."""
    report, found = merge(COMMITTED / case / "ckpt", tmp_path / "out", config=config_of(case))
    assert found == truth(case)
    assert "entries" in report.skipped["*._extra_state"]


def test_missing_weights_do_not_hide_among_extra_states(tmp_path: Path) -> None:
    """NeMo-RL#2124, Automodel#2247: a long list of `_extra_state` hides that whole layers are missing."""
    full = Decoder().megatron()
    full |= {f"decoder.layers.{n}.self_attention.linear_proj._extra_state": np.zeros(0, np.uint8) for n in range(2)}
    del full["decoder.layers.1.mlp.linear_fc2.weight"]
    source = write_legacy(tmp_path / "run", Decoder(), full=full)
    message = refuse(source, tmp_path / "out").message
    assert "model.layers.1.mlp.down_proj.weight" in message
    assert "1 tensor " in message
    assert "_extra_state" not in message


def write_dcp(directory: Path, model: Decoder, prefix: str, *, split: bool = False) -> Path:
    """The model in a DCP directory, from two ranks, its keys behind a prefix; gate and up by themselves (`split`)."""
    entries = {}
    for name, array in model.megatron().items():
        if split and name.endswith("linear_fc1.weight"):
            entries |= dict(zip((f"{prefix}{name}_w", f"{prefix}{name}_v"), np.split(array, 2), strict=True))
        else:
            entries[prefix + name] = array
    dcp_bytes.sharded(directory, entries).finish()
    write_json(directory / "hf" / "config.json", model.config())
    return directory


def test_fsdp_dtensor_is_told_from_other_dcp_directories(tmp_path: Path) -> None:
    """Megatron-LM#5895: Megatron-FSDP writes yet another layout, for which converters are only being written."""
    source = write_dcp(tmp_path / ITERATION, Decoder(), "model.module.", split=True)
    assert "fsdp_dtensor" in open_checkpoint(source).title
    assert same(merge(source, tmp_path / "out")[1], Decoder().weights())


@pytest.mark.parametrize("prefix", ["", "module.", "module.module.", "model.module.module."])
def test_wrappers_before_megatrons_names_are_taken_off(prefix: str, tmp_path: Path) -> None:
    """miles#735, miles#3190: "Unknown parameter name: module.module.language_model.embedding…"."""
    model = Decoder()
    ranks = write_legacy(tmp_path / "run", model, tp=2, rename=lambda name: prefix + name)
    assert same(merge(ranks, tmp_path / "out")[1], model.weights())
    source = write_dcp(tmp_path / "dist", model, prefix)
    write_json(source / "metadata.json", {"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    assert same(merge(source, tmp_path / "dcp")[1], model.weights())


@pytest.mark.parametrize("recorded", [True, False])
def test_flattened_tensors_are_never_read_in_a_wrong_shape(recorded: bool, tmp_path: Path) -> None:
    """NeMo Speech#13913: `nd_reformulated_orig_global_shape`, "Cannot find global shape metadata"."""
    model, name = Decoder(layers=1), "decoder.layers.0.mlp.linear_fc2.weight"
    full = model.megatron()
    shape = full[name].shape
    flat = full[name].reshape(2, shape[0] // 2, 2, shape[1] // 2).transpose(0, 2, 1, 3).reshape(2, 2, -1)
    facts = {name: opcodes.mapping({"nd_reformulated_orig_global_shape": opcodes.counts(shape)})}
    attributes = {"mcore_data": opcodes.mapping(facts)} if recorded else {}
    dcp_bytes.sharded(tmp_path / "dist", full | {name: np.ascontiguousarray(flat)}).finish(**attributes)
    write_json(tmp_path / "dist" / "hf" / "config.json", model.config())
    write_json(tmp_path / "dist" / "metadata.json", {"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    if recorded:
        assert same(merge(tmp_path / "dist", tmp_path / "out")[1], model.weights())
    else:
        assert "mlp.down_proj.weight: shape [2, 2, 96]" in refuse(tmp_path / "dist", tmp_path / "out").message


def write_zarr(directory: Path, model: Decoder, grid: tuple[int, int] = (2, 2)) -> Path:
    """megatron-core's zarr backend: a directory per tensor, uncompressed chunks that may reach over the edge."""
    for name, array in model.megatron().items():
        chunk = tuple([-(-size // count) for size, count in zip(array.shape, grid, strict=False)])
        padded = np.zeros([size * count for size, count in zip(chunk, grid, strict=False)], array.dtype)
        padded[tuple([slice(size) for size in array.shape])] = array
        (directory / name).mkdir(parents=True)
        facts = {"shape": list(array.shape), "chunks": list(chunk), "dtype": "<f4", "zarr_format": 2, "order": "C",
                 "compressor": None, "filters": None, "fill_value": None}  # fmt: skip
        write_json(directory / name / ".zarray", facts)
        for index in np.ndindex(*grid[: array.ndim]):
            box = tuple([slice(i * size, (i + 1) * size) for i, size in zip(index, chunk, strict=True)])
            (directory / name / ".".join(map(str, index))).write_bytes(padded[box].tobytes())
    write_json(directory / "metadata.json", {"sharded_backend": "zarr", "sharded_backend_version": 1})
    write_json(directory / "hf" / "config.json", model.config())
    return directory


def test_zarr_checkpoints_need_no_package(tmp_path: Path) -> None:
    """MAP-NEO#32: "Zarr-based strategies will not be registered because of missing packages"."""
    source = write_zarr(tmp_path / ITERATION, Decoder(vocabulary=39))
    assert same(merge(source, tmp_path / "out")[1], Decoder(vocabulary=39).weights())
    assert "zarr" not in sys.modules
    (source / "output_layer.weight" / "1.0").unlink()
    assert "1.0" in refuse(source, tmp_path / "no").message


ENUM = opcodes.call(opcodes.named("megatron.core.enums", "ModelType"), opcodes.integer(1))
BUFFER = opcodes.call(opcodes.named("_io", "BytesIO"), opcodes.named("builtins", "bytes") + b")R")
FOREIGN = record(opcodes.named("our_fork.training.config", "Launcher"), {"steps": opcodes.integer(3)})


@pytest.mark.parametrize("value", [ENUM, BUFFER, FOREIGN, opcodes.named("no.such.module", "f")], ids=lambda v: v[1:30])
def test_classes_of_the_training_code_are_not_needed(value: bytes, tmp_path: Path) -> None:
    """transformers#14939, Megatron-LLaMA#20, ms-swift#6553, ROCm/Megatron-LM#64: unpickling needs the training code."""
    source = write_legacy(
        tmp_path / "run", Decoder(), tp=2, args={"model_type": value}, beside={"rng_state": value, "more": value}
    )
    assert same(merge(source, tmp_path / "out")[1], Decoder().weights())
    dist = copy_case(DIST, tmp_path / "dist")
    write_common(dist / ITERATION / "common.pt", {"args": namespace({"num_layers": 2, "x": value}), "other": value})
    assert merge(dist, tmp_path / "merged", config=config_of(DIST))[1] == truth(DIST)


def write_common(path: Path, entries: dict[str, bytes]) -> None:
    """A `common.pt` of these opcodes."""
    pickle = opcodes.finish(opcodes.mapping({"iteration": opcodes.integer(10), **entries}))
    path.write_bytes(opcodes.archive(opcodes.torch_members(pickle, b"")))


@pytest.mark.parametrize("file", ["common.pt", "latest_train_state.pt", FILE])
def test_no_code_in_megatrons_pickles_is_run(file: str, tmp_path: Path) -> None:
    """Bridge#3138, Bridge#3506, Megatron-LM#6209: code in `common.pt`, `train_state.pt` and rank files was run."""
    mark = tmp_path / "was-run"
    attack = opcodes.call(opcodes.named("os", "mkdir"), opcodes.text(str(mark)))
    if file == FILE:
        source = write_legacy(tmp_path / "run", Decoder(), args={"loss": attack}, beside={"optimizer": attack})
    else:
        source = copy_case(DIST, tmp_path / "run")
        write_common(source / (ITERATION if file == "common.pt" else ".") / file, {"step": attack, "args": attack})
    unshard.merge(source, tmp_path / "out", config=source / "hf" if file == FILE else config_of(DIST))
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert not mark.exists()


POISON = """
import sys
class Poison:
    names = {"torch", "transformers", "megatron", "transformer_engine", "apex", "triton", "zarr", "flash_attn", "numba"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise SystemExit(f"{name} was imported")
sys.meta_path.insert(0, Poison())
import socket
def refuse(*arguments, **options):
    raise SystemExit("a connection was made")
socket.socket.connect = socket.getaddrinfo = refuse
from unshard.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("case", [LEGACY, "megatron_dist_tp2ep2etp1", "megatron_legacy_qwen3_next"])
def test_neither_framework_nor_gpu_nor_network_is_needed(case: str, tmp_path: Path) -> None:
    """Megatron-LM#773, #6989, ms-swift#4866, #6033, #4313, #4713, Bridge#3295, Bridge#2105: converters build models.

    "No module named 'megatron.training'", "0 active drivers", "CUDA error", mixed DTensors of models on two devices,
    and all weights downloaded for the config's sake.
    """
    arguments = ("merge", COMMITTED / case / "ckpt", tmp_path / "out", "--config", config_of(case))
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", POISON, *map(str, arguments)]
    ended = subprocess.run(command, env=environment, capture_output=True, check=False, text=True)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_nemo_2_checkpoints_are_found_from_above(tmp_path: Path) -> None:
    """Bridge#1693: no way led from NeMo 2 to Hugging Face; weights lie in `weights/`, the tokenizer in `context/`."""
    place = tmp_path / "default--step=10"
    shutil.copytree(COMMITTED / DIST / "ckpt" / ITERATION, place / "weights")
    tokenizer = place / "context" / "nemo_tokenizer"
    tokenizer.mkdir(parents=True)
    shutil.copyfile(config_of(DIST) / "tokenizer.json", tokenizer / "tokenizer.json")
    for number, level in enumerate((tmp_path, place, place / "weights")):
        output = tmp_path / f"out{number}" / "model"
        output.parent.mkdir()
        assert merge(level, output, config=config_of(DIST) / "config.json", overwrite=True)[1] == truth(DIST)
        assert (output / "tokenizer.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()
        shutil.rmtree(output.parent)


def test_tokenizer_of_the_checkpoint_is_taken(tmp_path: Path) -> None:
    """NeMo-RL#2210: the tokenizer of the base was written, not the one that was trained with."""
    source = copy_case(DIST, tmp_path / "run")
    for place, content in ((source / ITERATION / "tokenizer", b'{"mine": 1}'), (tmp_path / "base", b'{"base": 1}')):
        place.mkdir()
        (place / "tokenizer.json").write_bytes(content)
    unshard.merge(source, tmp_path / "out", config=config_of(DIST) / "config.json")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b'{"mine": 1}'
    unshard.merge(source, tmp_path / "given", config=config_of(DIST) / "config.json", tokenizer=tmp_path / "base")
    assert (tmp_path / "given" / "tokenizer.json").read_bytes() == b'{"base": 1}'


def lose_a_rank(source: Path) -> None:
    shutil.rmtree(source / ITERATION / "mp_rank_01_000")


def empty_a_file(source: Path) -> None:
    (source / ITERATION / "mp_rank_00_001" / FILE).write_bytes(b"")


def break_the_config(source: Path) -> None:
    edit_json(source / "hf" / "config.json", num_hidden_layers=5)


@pytest.mark.parametrize("harm", [lose_a_rank, empty_a_file, break_the_config])
def test_merge_that_writes_no_model_says_so(harm: Callable[[Path], None], tmp_path: Path) -> None:
    """ms-swift#6903, ms-swift#6691: the converter ends without an error, and there are no model files."""
    source = write_legacy(tmp_path / "run", Decoder(), tp=2, pp=2)
    good = run("merge", source, tmp_path / "good")
    assert good.code == 0
    assert {"config.json", "model.safetensors"} <= {file.name for file in (tmp_path / "good").iterdir()}
    harm(source)
    outcome = run("merge", source, tmp_path / "out")
    assert outcome.code in (4, 5, 6)
    assert outcome.stderr.startswith("error: ")
    assert not (tmp_path / "out").exists()


def test_ranks_of_several_nodes_are_read_together(tmp_path: Path) -> None:
    """verl#625, verl#2356: each node has the directories of its own ranks."""
    model = Decoder()
    first = write_legacy(tmp_path / "node0", model, tp=2, pp=2) / ITERATION
    second = tmp_path / "node1" / ITERATION
    second.mkdir(parents=True)
    for name in ("mp_rank_00_001", "mp_rank_01_001"):
        (first / name).rename(second / name)
    error = refuse(tmp_path / "node0", tmp_path / "no")
    assert isinstance(error, IncompleteError)
    assert "mp_rank_00_001, mp_rank_01_001" in error.message
    assert same(merge(tmp_path / "node0", tmp_path / "out", also=[second])[1], model.weights())


def test_facts_of_the_run_are_in_the_json_of_inspect() -> None:
    """MAP-NEO#32: "cannot unpack non-iterable Namespace object": only their own framework could read arguments."""
    event = run("inspect", COMMITTED / LEGACY / "ckpt", "--json").events[-1]
    facts: dict[str, Any] = event["facts"]
    assert facts["tensor_model_parallel_size"] == facts["pipeline_model_parallel_size"] == 2
    assert facts["num_layers"] == json.loads((config_of(LEGACY) / "config.json").read_text())["num_hidden_layers"]


def test_report_names_what_was_left_out(tmp_path: Path) -> None:
    """NeMo-RL#2124: what is expected to be absent, and what is missing, were one list."""
    report = merge(COMMITTED / DIST / "ckpt", tmp_path / "out", config=config_of(DIST))[0]
    assert report.skipped.keys() == {"optimizer", "*._extra_state"}
    assert "missing" not in words(report)
