"""accelerate's `save_state` under FSDP, on a machine without a GPU."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import accelerate.accelerator
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType, save_fsdp_model
from torch import nn
from transformers import PreTrainedModel

from golden.make.dcp.table import SavedCase

_KINDS = {"sharded": "SHARDED_STATE_DICT", "ranks": "SHARDED_STATE_DICT"}
_KINDS |= {"full": "FULL_STATE_DICT", "local": "LOCAL_STATE_DICT"}


def train_and_save(trained: nn.Module, model: PreTrainedModel, case: SavedCase, directory: Path) -> None:
    """Prepare model and optimizer, take a step that changes nothing, save all that accelerate knows of."""
    accelerator = _start(model, case)
    optimizer = functools.partial(torch.optim.AdamW, lr=0.0, weight_decay=0.0)
    if case.engine == "fsdp2":
        prepared, stepped = accelerator.prepare(trained, optimizer(trained.parameters()))
    else:  # FSDP1 replaces the parameters
        prepared = accelerator.prepare(trained)
        stepped = accelerator.prepare(optimizer(prepared.parameters()))
    for parameter in prepared.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    stepped.step()
    if case.state == "ranks":  # `save_state` has no word for it
        accelerate.accelerator.save_fsdp_model = functools.partial(save_fsdp_model, use_dcp=False)
    if not case.optimizer:
        accelerator._optimizers.clear()
    accelerator.save_state(str(directory))


def _start(model: PreTrainedModel, case: SavedCase) -> Accelerator:
    """An accelerator that shards: it does so for groups of accelerators alone, and must take these ranks for one."""
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    options: dict[str, Any] = {
        "fsdp_version": 2 if case.engine == "fsdp2" else 1,
        "state_dict_type": _KINDS[case.state],
        "cpu_ram_efficient_loading": False,
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": sorted(model._no_split_modules),
    }
    if case.engine == "fsdp2":
        options["reshard_after_forward"] = True
    return Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**options))
