"""Faults from the field with DeepSpeed's checkpoints: zero_to_fp32, Trainer, accelerate, Lightning, trl."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from field_cases import copy_case, merge, refuse, same, truth, warnings, words

import torch_bytes as opcodes
import unshard
from deepspeed_bytes import BF16, Job, Weights, weights
from fsdp_bytes import RankFile, world, write_json
from golden.tensor_files import read_tensors
from unshard.errors import OutputError

TOY = {"model_type": "toy", "architectures": ["ToyForCausalLM"]}
TRAINED = weights({"embed_tokens.weight": (11, 3), "layers.0.weight": (3, 7)})


def write_run(directory: Path, job: Job, tag: str = "global_step7", **config: Any) -> Path:
    """A run: the tag that `latest` names, and a config beside it."""
    job.write(directory / tag)
    (directory / "latest").write_text(tag)
    write_json(directory / "config.json", TOY | config)
    return directory


def as_float(arrays: Weights) -> Weights:
    return {name: array.astype(np.float32) for name, array in arrays.items()}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_second_name_of_a_shared_parameter_is_not_missing(stage: int, tmp_path: Path) -> None:
    """DeepSpeed#1896, #3824, Lightning#15694: the optimizer holds one copy, and `lm_head.weight` was lost."""
    job = Job(stage, 2, [TRAINED], shared={"lm_head.weight": "embed_tokens.weight"})
    run = write_run(tmp_path / "untied", job, tie_word_embeddings=False)
    assert same(merge(run, tmp_path / "out")[1], job.masters())


@pytest.mark.parametrize("case", ["deepspeed_z2_tied", "deepspeed_z3_tied"])
def test_tied_head_comes_out_once(case: str, tmp_path: Path) -> None:
    """The same, where the config ties them: transformers makes the second name again."""
    assert merge(copy_case(case, tmp_path / "run"), tmp_path / "out")[1] == truth(case)


@pytest.mark.parametrize("case", ["deepspeed_z0_bf16", "deepspeed_z0_fp16", "deepspeed_z0_fp32"])
def test_without_zero_the_module_is_the_model(case: str, tmp_path: Path) -> None:
    """DeepSpeed#3089, accelerate#3210: `unknown zero stage`, no ZeRO files where stage 0 had trained."""
    assert merge(copy_case(case, tmp_path / "run"), tmp_path / "out")[1] == truth(case)


@pytest.mark.parametrize("weights", ["master", "model"])
def test_experts_lie_in_files_of_their_own(weights: str, tmp_path: Path) -> None:
    """DeepSpeed#1876, #4497: `layer_0_expert_0_…` and `expp_rank_…` files were not handled, or were an error."""
    source = copy_case("deepspeed_moe_ep2_w4", tmp_path / "run")
    part = "truth" if weights == "master" else "truth16"
    merged = merge(source, tmp_path / "out", weights_only=True, weights=weights)[1]
    assert merged == truth("deepspeed_moe_ep2_w4", part)


def test_optimizer_states_of_experts_are_no_obstacle(tmp_path: Path) -> None:
    """DeepSpeed#4497, Megatron-DeepSpeed#300: without ZeRO, a MoE job saves `expp_rank_*` beside the experts."""
    source = copy_case("deepspeed_moe_ep2_w4", tmp_path / "run")
    for file in (source / "global_step1").glob("*zero_pp_rank_*"):
        file.unlink()
    for rank in range(2):
        (source / f"global_step1/expp_rank_{rank}_mp_rank_00_optim_states.pt").write_bytes(b"whatever")
    merged = merge(source, tmp_path / "out", weights_only=True, weights="model")[1]
    assert merged == truth("deepspeed_moe_ep2_w4", "truth16")


def test_frozen_weights_are_not_passed_off_as_masters(tmp_path: Path) -> None:
    """DeepSpeed PR#8378: a function named fp32 gave frozen parameters in bf16, and said nothing."""
    frozen = weights({"base.weight": (5, 4)}, dtype=BF16)
    job = Job(3, 2, [TRAINED], frozen=frozen)
    report, merged = merge(write_run(tmp_path / "run", job), tmp_path / "out")
    assert same(merged, as_float(job.masters()))
    assert "1 parameter without training has no masters: widened exactly to fp32" in words(report)


def test_moments_are_never_read(tmp_path: Path) -> None:
    """DeepSpeed#1062, #6526: twice the model in memory, since optimizer states were loaded too."""
    job = Job(2, 2, [TRAINED])
    run = write_run(tmp_path / "run", job)
    for file in (run / "global_step7").glob("*optim_states.pt"):
        data = bytearray(file.read_bytes())
        moments = np.full(4, 9, np.float32).tobytes()
        assert moments in data
        for _ in range(data.count(moments)):
            place = data.find(moments)
            data[place : place + 16] = b"\xff" * 16
        file.write_bytes(data)
    assert same(merge(run, tmp_path / "out")[1], job.masters())


@pytest.mark.parametrize("case", ["deepspeed_z1_bf16_optimizer", "deepspeed_z1_bf16", "deepspeed_z3_bf16"])
def test_files_of_bf16_jobs_are_found(case: str, tmp_path: Path) -> None:
    """Megatron-DeepSpeed#280: `bf16_zero_pp_rank_*` were not found; BF16_Optimizer says no stage."""
    source = copy_case(case, tmp_path / "run")
    assert list(source.glob("*/bf16_zero_pp_rank_*"))
    assert merge(source, tmp_path / "out")[1] == truth(case)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_whose_files_are_missing_are_all_named(stage: int, tmp_path: Path) -> None:
    """LlamaFactory#8098: FileNotFoundError of `zero_pp_rank_4_mp_rank_00_optim_states.pt`, one after the other."""
    run = write_run(tmp_path / "run", Job(stage, 6, [TRAINED]))
    for rank in (4, 5):
        (run / f"global_step7/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").unlink()
    error = str(refuse(run, tmp_path / "out"))
    assert "over 6 data-parallel ranks; ranks 4-5 are missing" in error
    assert "pp_rank_4_mp_rank_00_optim_states.pt" in error
    assert "pp_rank_5_mp_rank_00_optim_states.pt" in error


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_of_two_nodes_come_where_they_belong(stage: int, tmp_path: Path) -> None:
    """DeepSpeed#6691, PR#7601: right on one node; on two, ranks were taken for others, and the loss began anew."""
    job = Job(stage, 12, [TRAINED, weights({"head.weight": (29, 3)}, start=500)])
    run = write_run(tmp_path / "node0", job)
    there = tmp_path / "node1/global_step7"
    there.mkdir(parents=True)
    for rank in range(1, 12, 2):
        for file in (run / "global_step7").glob(f"*zero_pp_rank_{rank}_*"):
            file.rename(there / file.name)
    report, merged = merge(run, tmp_path / "out", also=[there.parent])
    assert same(merged, job.masters())
    assert "12 ranks" in report.checkpoint
    assert unshard.verify(tmp_path / "out", against=run, also=[there.parent]).holds
    assert "ranks 1, 3, 5, 7, 9, 11 are missing" in str(refuse(run, tmp_path / "no"))


@pytest.mark.parametrize("stage", [1, 2])
def test_partitions_that_are_taken_for_one_another_are_found(stage: int, tmp_path: Path) -> None:
    """The same: nobody compared where the fragments of parameters lie with where the rank says they do."""
    run = write_run(tmp_path / "run", Job(stage, 3, [TRAINED]))
    first, second, _ = sorted((run / "global_step7").glob("*optim_states.pt"))
    first.rename(tmp_path / "kept")
    second.rename(first)
    (tmp_path / "kept").rename(second)
    assert "`param_shapes`" in refuse(run, tmp_path / "out").message


@pytest.mark.parametrize("layout", ["one buffer", "rows and columns"])
def test_views_into_one_buffer_come_out_apart(layout: str, tmp_path: Path) -> None:
    """safetensors#202, #304, transformers#28630: the module's parameters are views into DeepSpeed's flat buffers."""
    flat = (np.arange(40) / 7).astype(BF16)
    places = {"a": ((4, 3), (3, 1), 0), "b": ((5,), (1,), 12), "c": ((3, 7), (7, 1), 17)}
    if layout == "rows and columns":
        places = {"a": ((4, 3), (1, 4), 5), "b": ((5,), (7,), 0), "c": ((4, 3), (3, 1), 5)}
    file = RankFile(world(1), 0)
    buffer = file.keep(flat)
    file.add_opcodes(
        "module", opcodes.mapping({name: opcodes.tensor(buffer, *place) for name, place in places.items()})
    )
    (tmp_path / "run/global_step7").mkdir(parents=True)
    file.write(tmp_path / "run/global_step7/mp_rank_00_model_states.pt")
    write_json(tmp_path / "run/config.json", TOY)
    expected = {
        name: np.lib.stride_tricks.as_strided(flat[start:], shape, [2 * step for step in strides])
        for name, (shape, strides, start) in places.items()
    }
    assert same(merge(tmp_path / "run", tmp_path / "out")[1], expected)


@pytest.mark.parametrize("stage", [None, 1, 2, 3])
def test_disk_is_known_before_the_first_byte(
    stage: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron-DeepSpeed#343: BLOOM-7b filled 3.5 TB with temporary fragments, where 84 GB were expected."""
    run = write_run(tmp_path / "run", Job(stage, 2, [weights({"weight": (1000, 3)})]))
    nearly_full = os.statvfs_result((512, 512, 9999, 2, 2, 99, 99, 99, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _path: nearly_full)
    error = refuse(run, tmp_path / "out")
    assert isinstance(error, OutputError)
    assert re.search(r"1[23]\.\d kB are needed, 1\.02 kB are free", error.message)


@pytest.mark.parametrize("stage", [None, 1, 2, 3])
def test_parameters_without_elements_take_no_place(stage: int | None, tmp_path: Path) -> None:
    """trl#4416: shapes of [0] are placeholders under ZeRO-3; a parameter may have no elements all the same."""
    shapes = {"first": (0,), "a": (5, 3), "empty": (0, 4), "b": (2,), "last": (3, 0)}
    job = Job(stage, 4, [weights(shapes), weights({"alone": (0, 2)}), weights({"head": (1,)}, start=90)])
    assert same(merge(write_run(tmp_path / "run", job), tmp_path / "out")[1], job.masters())


def test_masters_that_were_asked_for_are_never_replaced(tmp_path: Path) -> None:
    """DeepSpeed PR#8378: what was asked for as fp32 came in bf16. Unasked, the module is taken, with a warning."""
    job = Job(2, 2, [TRAINED])
    run = write_run(tmp_path / "run", job)
    for file in (run / "global_step7").glob("*optim_states.pt"):
        file.unlink()
    assert "--weights model" in str(refuse(run, tmp_path / "no", weights="master").hint)
    for number, options in enumerate([{}, {"weights": "model"}]):
        report, merged = merge(run, tmp_path / f"out{number}", **options)
        assert same(merged, job.module())
        assert ("the module's bf16 weights were taken" in warnings(report)) == (not options)


def test_directory_that_a_smaller_world_used_again(tmp_path: Path) -> None:
    """LlamaFactory#1253: the world changed between saves; the extra files are of another training state."""
    before, job = Job(2, 5, [weights({"x": (9, 9)})]), Job(2, 2, [TRAINED])
    before.write(tmp_path / "run" / "global_step7")
    report, merged = merge(write_run(tmp_path / "run", job), tmp_path / "out")
    assert same(merged, job.masters())
    assert "3 files of optimizer states are left over" in warnings(report)


def test_adapter_is_rebuilt_where_40_bytes_were_saved(tmp_path: Path) -> None:
    """trl#4416, peft#2892: `adapter_model.safetensors` of 40 bytes beside the partitions that hold the adapter."""
    source = copy_case("deepspeed_z3_lora", tmp_path / "run")
    head = json.dumps({}).encode().ljust(32)
    (source / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head)
    assert (source / "adapter_model.safetensors").stat().st_size == 40
    merge(source, tmp_path / "out", adapter_only=True)
    assert read_tensors(tmp_path / "out") == truth("deepspeed_z3_lora", "truth_adapter")


@pytest.mark.parametrize("given", ["", "global_step7", "global_step7/mp_rank_00_model_states.pt"])
def test_files_without_latest_and_script_are_enough(given: str, tmp_path: Path) -> None:
    """DeepSpeed#7663: "how to use zero_to_fp32 when my model list is like below", without `latest`."""
    job = Job(2, 2, [TRAINED])
    run = write_run(tmp_path / "run", job)
    (run / "latest").unlink()
    assert same(merge(run / given, tmp_path / "out")[1], job.masters())


def test_several_tags_without_latest_are_never_chosen_from(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Job(2, 2, [TRAINED]))
    shutil.copytree(run / "global_step7", run / "global_step10")
    (run / "latest").unlink()
    error = str(refuse(run, tmp_path / "out"))
    assert error.index("global_step7") < error.index("global_step10")


def test_latest_decides_among_tags_and_must_be_there(tmp_path: Path) -> None:
    job, other = Job(2, 2, [TRAINED]), Job(2, 2, [weights({"x": (3,)})])
    other.write(tmp_path / "run" / "global_step10")
    run = write_run(tmp_path / "run", job)
    report, merged = merge(run, tmp_path / "out")
    assert same(merged, job.masters())
    assert "`latest` names global_step7" in words(report)
    (run / "latest").write_text("global_step8\n")
    error = str(refuse(run, tmp_path / "out2"))
    assert "latest says that global_step8 is the latest tag" in error
    assert "there are global_step10, global_step7" in error


@pytest.mark.parametrize("given", ["", "checkpoint-7", "checkpoint-7/global_step7"])
def test_directories_of_trainer(given: str, tmp_path: Path) -> None:
    """Trainer keeps config and tokenizer in `checkpoint-7`, and DeepSpeed's tag below it."""
    job = Job(3, 2, [TRAINED])
    write_run(tmp_path / "run" / "checkpoint-7", job)
    assert same(merge(tmp_path / "run" / given, tmp_path / "out")[1], job.masters())
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize("given", ["", "pytorch_model"])
def test_directories_of_accelerate(given: str, tmp_path: Path) -> None:
    """`Accelerator.save_state` names the tag after its model."""
    job = Job(2, 2, [TRAINED])
    run = write_run(tmp_path / "state", job, "pytorch_model")
    assert same(merge(run / given, tmp_path / "out")[1], job.masters())


@pytest.mark.parametrize("given", ["", "last.ckpt", "last.ckpt/checkpoint"])
def test_directories_of_lightning(given: str, tmp_path: Path) -> None:
    """Lightning calls the tag `checkpoint`, and holds the model as an attribute."""
    golden = {
        name: np.frombuffer(t.data, np.float32).reshape(t.shape) for name, t in truth("deepspeed_z2_bf16").items()
    }
    job = Job(2, 2, [{f"_forward_module.model.{name}": array for name, array in golden.items()}])
    write_run(tmp_path / "run" / "last.ckpt", job, "checkpoint")
    config = copy_case("deepspeed_z2_bf16", tmp_path / "hf", "truth")
    assert same(merge(tmp_path / "run" / given, tmp_path / "out", config=config)[1], golden)
