"""Where trainers put what the ranks save: one function per layout, called on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from transformers import PreTrainedModel

from golden.make.models import save_side_files

if TYPE_CHECKING:
    from golden.make.table import Case

State = dict[str, Any]


def verl(directory: Path, rank: int, case: Case, state: State, model: PreTrainedModel) -> None:
    """A role directory of verl, as its FSDP checkpoint manager fills it; EasyR1 and SkyRL keep the file names."""
    directory.mkdir(parents=True, exist_ok=True)
    suffix = f"world_size_{case.world}_rank_{rank}.pt"
    torch.save(state, directory / f"model_{suffix}")
    if case.trainer_state:
        _save_trainer_state(directory, suffix)
    if rank == 0:
        save_side_files(model, directory / "huggingface")
        if case.fsdp_config:
            _write_fsdp_config(directory, case)
        _write_adapter_facts(directory, case)


def _save_trainer_state(directory: Path, suffix: str) -> None:
    """What lies beside the model and must be left alone: an optimizer and random states, with numpy objects in them."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    torch.save(optimizer.state_dict(), directory / f"optim_{suffix}")
    rng = {"cpu": torch.get_rng_state()[:16], "numpy": numpy.random.default_rng(0)}
    torch.save({"lr_scheduler": None, "rng": rng}, directory / f"extra_state_{suffix}")


def _write_fsdp_config(directory: Path, case: Case) -> None:
    version = 2 if case.engine == "fsdp2" else 1
    facts = {"FSDP_version": version, "world_size": case.world}
    (directory / "fsdp_config.json").write_text(json.dumps(facts, indent=4))


def _write_adapter_facts(directory: Path, case: Case) -> None:
    """Write `lora_train_meta.json` as verl does, or PEFT's whole config where rank and alpha do not tell enough."""
    if case.lora is None or case.lora.facts == "none":
        return
    config = case.lora.peft_config()
    if case.lora.facts == "peft":
        config.save_pretrained(directory)
    else:
        meta = {"r": config.r, "lora_alpha": config.lora_alpha, "task_type": "CAUSAL_LM"}
        (directory / "lora_train_meta.json").write_text(json.dumps(meta, indent=4))


def verl_run(directory: Path, rank: int, case: Case, state: State, model: PreTrainedModel) -> None:
    """A run directory: the step that `latest_checkpointed_iteration.txt` names, and an older one of zeros beside it."""
    zeros = {name: torch.zeros(3) for name in list(state)[:2]}
    verl(directory / "global_step_10" / "actor", rank, case, zeros, model)
    verl(directory / "global_step_20" / "actor", rank, case, state, model)
    if rank == 0:
        (directory / "latest_checkpointed_iteration.txt").write_text("20")
        torch.save({"sampler": 3}, directory / "global_step_20" / "data.pt")


def skyrl(directory: Path, rank: int, case: Case, state: State, model: PreTrainedModel) -> None:
    """SkyRL's run directory: the role is called `policy`, the step file `latest_ckpt_global_step.txt`."""
    verl(directory / "global_step_5" / "policy", rank, case, state, model)
    if rank == 0:
        (directory / "latest_ckpt_global_step.txt").write_text("5")
        torch.save({"global_step": 5}, directory / "global_step_5" / "trainer_state.pt")


def easyr1(directory: Path, rank: int, case: Case, state: State, model: PreTrainedModel) -> None:
    """EasyR1's run directory: `checkpoint_tracker.json` names the last step."""
    verl(directory / "global_step_7" / "actor", rank, case, state, model)
    if rank == 0:
        tracker = {"best_global_step": 7, "best_val_reward_score": 0.5, "last_global_step": 7}
        (directory / "checkpoint_tracker.json").write_text(json.dumps(tracker, indent=2))
        torch.save({"sampler": 3}, directory / "global_step_7" / "dataloader.pt")


def nodes(directory: Path, rank: int, case: Case, state: State, model: PreTrainedModel) -> None:
    """Two nodes with a disk of their own: each holds its own ranks' files, the first the side files too."""
    node = rank * 2 // case.world
    verl(directory / f"node{node}", rank, case, state, model)


def rank_files(directory: Path, rank: int, case: Case, state: State, model: PreTrainedModel) -> None:
    """`rank_R.pt` with `fsdp_config.json`, and the side files beside them."""
    directory.mkdir(parents=True, exist_ok=True)
    torch.save(state, directory / f"rank_{rank}.pt")
    if rank == 0:
        save_side_files(model, directory)
        _write_fsdp_config(directory, case)


def accelerate(directory: Path, rank: int, case: Case, state: State, model: PreTrainedModel) -> None:
    """The model files of accelerate's `save_fsdp_model` in a Trainer's checkpoint directory.

    Full state dicts: `pytorch_model_fsdp.bin`, by rank 0. Local: `pytorch_model_fsdp_rank{r}.bin`. Sharded with
    `use_dcp=False`: `pytorch_model_fsdp_0_rank{r}.bin`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if case.state == "full":
        name = "pytorch_model_fsdp.bin" if rank == 0 else None
    else:
        name = f"pytorch_model_fsdp{'' if case.state == 'local' else '_0'}_rank{rank}.bin"
    if name:
        torch.save(state, directory / name)
    if rank == 0:
        save_side_files(model, directory)
        torch.save({"last_epoch": 1}, directory / "scheduler.bin")


def lone_file(directory: Path, rank: int, case: Case, state: State, model: PreTrainedModel) -> None:
    """One `model.pt` by rank 0; the side files lie elsewhere, for `--config`."""
    if rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
        torch.save(state, directory / "model.pt", _use_new_zipfile_serialization=not case.legacy_stream)
        save_side_files(model, directory.parent / "hf")


LAYOUTS: dict[str, Callable[[Path, int, Case, State, PreTrainedModel], None]] = {
    "verl": verl,
    "verl_run": verl_run,
    "skyrl": skyrl,
    "easyr1": easyr1,
    "nodes": nodes,
    "rank_files": rank_files,
    "accelerate": accelerate,
    "lone_file": lone_file,
}
