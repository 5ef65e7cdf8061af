"""One golden checkpoint: the truths of a model, and what the ranks of a job that trains it save."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from golden.make.engines import shard, take_state
from golden.make.layouts import LAYOUTS
from golden.make.lora import add_adapter, save_truths
from golden.make.models import DTYPES, ValueHeadModel, make_model, randomize
from golden.make.ranks import run_ranks

if TYPE_CHECKING:
    from golden.make.table import Case

Job: TypeAlias = Callable[[int, nn.Module, PreTrainedModel, "Case", Path], None]
"""One rank's part: its number, what is trained, the model in it, the case, and where the checkpoint goes."""


def train_rank(rank: int, trained: nn.Module, model: PreTrainedModel, case: Case, directory: Path) -> None:
    """Shard, and save what this rank holds. No step is taken: the values are the truth's."""
    state = take_state(shard(trained, case), case)
    LAYOUTS[case.layout](directory, rank, case, state, model)


def write_case(case: Case, directory: Path, job: Job = train_rank) -> None:
    """Write `ckpt/` and the truths of one case."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    model = make_model(case.model, dtype=case.dtype, tied=case.tied, task=case.task, seed=case.seed)
    model.save_pretrained(directory / "truth")
    trained = _prepare(model, case, directory)
    run_ranks(job, case.world, trained, model, case, directory / "ckpt")


def _prepare(model: PreTrainedModel, case: Case, directory: Path) -> nn.Module:
    """What is trained: the model itself, with an adapter, a value head or another output layer; and their truths."""
    if case.lora is not None:
        trained = add_adapter(copy.deepcopy(model), case.lora, DTYPES[case.dtype], case.seed)
        save_truths(trained, directory, DTYPES[case.dtype])
        return trained
    if case.value_head is not None:
        trained = ValueHeadModel(model, flat=case.value_head == "flat", seed=case.seed).to(DTYPES[case.dtype])
        whole = {name.removeprefix("pretrained_model."): value for name, value in trained.state_dict().items()}
        save_file(whole, directory / "truth" / "model.safetensors", metadata={"format": "pt"})
        return trained
    if case.untied_in_training:
        trained = copy.deepcopy(model)
        trained.lm_head.weight = nn.Parameter(trained.lm_head.weight.detach().clone())
        randomize(trained, case.seed + 1, only="lm_head")
        untied = copy.deepcopy(trained)
        untied.config.tie_word_embeddings = False
        untied.save_pretrained(directory / "truth_untied")
        return trained
    return model
