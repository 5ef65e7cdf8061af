"""A job of DeepSpeed: one step, what it saves, and the weights that it holds in the end."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param
from peft import PeftModel
from safetensors.torch import save_file
from torch import nn

import deepspeed
from golden.make.deepspeed.table import DeepSpeedCase
from golden.make.lora import add_adapter, save_truths
from golden.make.models import DTYPES, make_model, save_side_files
from golden.make.ranks import run_ranks

State = dict[str, torch.Tensor]


def write_deepspeed_case(case: DeepSpeedCase, directory: Path) -> None:
    """Write `ckpt/` and the truths of one case."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    model = _make(case, "fp32")
    save_side_files(model, directory / case.side_files)
    if case.lora is not None:
        case.lora.peft_config().save_pretrained(directory / case.folder)
    run_ranks(_train_rank, case.world, model, case, directory)
    for script in directory.rglob("zero_to_*.py"):
        script.unlink()  # 30 kB in each case, and nothing of the checkpoint
    if case.universal:
        _convert(directory / case.folder)


def _make(case: DeepSpeedCase, dtype: str) -> Any:
    model = make_model(case.model, dtype=dtype, tied=case.tied, task="causal", seed=case.seed)
    return model if case.lora is None else add_adapter(model, case.lora, DTYPES[dtype], case.seed)


def _train_rank(rank: int, model: Any, case: DeepSpeedCase, directory: Path) -> None:
    engine = _start(model, case)
    _step(engine, rank)
    engine.save_checkpoint(str(directory / case.folder), exclude_frozen_parameters=case.exclude_frozen)
    if case.gathered:
        engine.save_16bit_model(str(directory / case.folder))
    masters, low = _gather(engine)
    if rank != 0:
        return
    if case.stage == 0:  # if there are masters, nothing in the checkpoint names them
        _save_truths(low, case, case.dtype, directory, "truth")
        return
    _save_truths(masters, case, "fp32", directory, "truth")
    if case.dtype != "fp32":
        _save_truths(low, case, case.dtype, directory, "truth16")


def _start(model: nn.Module, case: DeepSpeedCase) -> Any:
    get_accelerator().is_fp16_supported = lambda: True  # it asks for speed; torch computes in fp16 on every CPU
    if case.model == "qwen3_moe":  # the grouped kernel wants rows of whole 16 bytes
        model.set_experts_implementation("eager")
    model.train()
    if case.buffer:
        model.model.register_buffer("scale", torch.arange(5, dtype=torch.float32) / 7)
    for name, parameter in model.named_parameters():
        if case.frozen and case.frozen in name:
            parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW(list(_groups(model, case)), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=_config(case))
    return engine


def _groups(model: nn.Module, case: DeepSpeedCase) -> Iterator[dict[str, Any]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    smallest = min(trained, key=torch.numel)
    first = {
        "one": lambda _parameter: True,
        "two": lambda parameter: parameter.dim() > 1,
        "small": lambda parameter: parameter is smallest,
    }[case.groups]
    yield {"params": [parameter for parameter in trained if first(parameter)], "weight_decay": 0.1}
    if case.groups != "one":
        yield {"params": [parameter for parameter in trained if not first(parameter)], "weight_decay": 0.0}


def _config(case: DeepSpeedCase) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": case.stage}
    if case.stage == 3:  # small parameters would stay whole, and pieces of all sizes are wanted
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": case.gathered}
    precision = {
        "fp32": {},
        "bf16": {"bf16": {"enabled": True}},
        "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
    }[case.dtype]
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {**zero, **case.zero},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        **precision,
        **case.config,
    }


def _step(engine: Any, rank: int) -> None:
    torch.manual_seed(100 + rank)
    tokens = torch.randint(3, 17, (1, 12))
    result = engine(input_ids=tokens)
    values = result.logits if hasattr(result, "logits") else result
    engine.backward(values.float().pow(2).mean())
    engine.step()


def _gather(engine: Any) -> tuple[State, State]:
    """All weights, called on every rank: fp32 masters (frozen parameters widened), and what the layers compute with."""
    masters, low = {}, {}
    in_turn = dict(_masters_in_turn(engine.optimizer)) if engine.zero_round_robin_gradients() else {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters([parameter]):
            low[name] = parameter.detach().clone()
        master = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        master = in_turn.get(id(parameter), master)
        widened = low[name].float() if master is None else master.detach().clone()
        masters[name] = widened.reshape(low[name].shape)
        if not torch.equal(masters[name].to(low[name].dtype), low[name]):
            raise AssertionError(f"{name}: the master is not that of the parameter")
    kept = engine.module.state_dict().keys()
    buffers = {name: buffer.detach().clone() for name, buffer in engine.module.named_buffers() if name in kept}
    return masters | buffers, low | buffers


def _masters_in_turn(optimizer: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """The id of each parameter, and its master, where parameters are dealt out in turn.

    DeepSpeed 0.19.8 lays them out in that order, and looks for their fragments (`safe_get_full_fp32_param`, and
    `param_slice_mappings` in what it saves) as if they lay in that of the model.
    """
    for group, partition in zip(
        optimizer.round_robin_bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True
    ):
        pieces = [torch.empty_like(partition) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, partition.detach())
        sizes = [parameter.numel() for parameter in group]
        flat = torch.cat(pieces)[: sum(sizes)]
        yield from zip(map(id, group), flat.split(sizes), strict=True)


@torch.no_grad()
def _save_truths(state: State, case: DeepSpeedCase, dtype: str, directory: Path, name: str) -> None:
    """Write `name`/ by `save_pretrained`, and the adapter or the buffers that belong to it."""
    model = _make(case, dtype)
    if case.model == "custom":  # its parameters are not cast by `make_model`, nor its buffers by DeepSpeed
        model.to(DTYPES[dtype]).save_pretrained(directory / name)
        save_file(state, directory / name / "model.safetensors", metadata={"format": "pt"})
        return
    known = model.state_dict()
    for key, value in state.items():
        if key in known:
            known[key].copy_(value)
    if case.lora is not None:
        _save_adapter(model, directory, DTYPES[dtype], name)
        model = copy.deepcopy(model).unload()
    model.save_pretrained(directory / name)
    if case.buffer:
        (directory / f"{name}_raw").mkdir()
        save_file(state, directory / f"{name}_raw" / "model.safetensors", metadata={"format": "pt"})


def _save_adapter(model: PeftModel, directory: Path, dtype: torch.dtype, name: str) -> None:
    if name == "truth":
        save_truths(model, directory, dtype)
    else:
        model.save_pretrained(directory / f"{name}_adapter")
        (directory / f"{name}_adapter" / "README.md").unlink()


def _convert(checkpoint: Path) -> None:
    """Put the universal checkpoint in the place of the one that it is made from."""
    partitions = checkpoint.rename(checkpoint.with_name("partitions"))
    tag = (partitions / "latest").read_text().strip()
    folders = ["--input_folder", str(partitions / tag), "--output_folder", str(checkpoint / f"{tag}_universal")]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *folders, *workers]
    subprocess.run(command, check=True, capture_output=True)
    for latest in partitions.glob("latest_universal"):
        latest.rename(checkpoint / latest.name)
    shutil.rmtree(partitions)
