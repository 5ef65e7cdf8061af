"""Write what torch.distributed.checkpoint saves: in `tests/`, `python -m golden.make.dcp [--only TEXT]`.

By torch itself, its HuggingFaceStorageWriter and accelerate, on gloo. Runs by hand, takes about a minute on two cores,
needs the packages of `make test` and zstandard.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from golden.make.command import make_parser, write_cases
from golden.make.dcp.saving import SAVERS, nest, step_optimizer
from golden.make.dcp.table import CASES, SavedCase
from golden.make.engines import shard, take_state
from golden.make.models import save_side_files
from golden.make.writing import write_case

_PACKAGES = ("torch", "transformers", "peft", "accelerate", "safetensors", "zstandard")


def train_rank(rank: int, trained: nn.Module, model: PreTrainedModel, case: SavedCase, directory: Path) -> None:
    """Shard, and save what this rank holds."""
    place = directory.parent / case.folder
    if rank == 0:
        save_side_files(model, directory.parent / case.side_files)
        if case.lora is not None:
            case.lora.peft_config().save_pretrained(place)
    torch.distributed.barrier()
    if case.saver == "accelerate":
        from golden.make.dcp.accelerate import train_and_save

        train_and_save(trained, model, case, place)
        return
    sharded = shard(trained, case)
    state = take_state(sharded, case)
    optimizer = step_optimizer(sharded) if case.optimizer else None
    SAVERS[case.saver](place, nest(case.root, state, optimizer))


if __name__ == "__main__":
    os.environ |= {"ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_FSDP": "true", "ACCELERATE_TORCH_DEVICE": "cpu"}
    torch.set_num_threads(1)
    write_cases(make_parser(__doc__).parse_args(), CASES, _PACKAGES, functools.partial(write_case, job=train_rank))
