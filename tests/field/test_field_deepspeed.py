"""Faults from the field with DeepSpeed's checkpoints: zero_to_fp32, Trainer, accelerate, Lightning, trl."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from field_cases import copy_case, merge, refuse, same, truth, warnings, words

from deepspeed_bytes import BF16, Job, Weights, weights
from fsdp_bytes import write_json
from golden.tensor_files import read_tensors

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
