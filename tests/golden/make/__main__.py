"""Write the golden checkpoints: in `tests/`, `python -m golden.make [--only TEXT] [--out DIRECTORY]`.

They are written by torch, transformers and peft themselves, on gloo, each with the truth beside it; `case.json` records
the versions. Runs by hand, takes about half a minute on two cores, needs `make test`'s packages; the cases of
transformers 4 are written where that is installed (4.57.6, with peft 0.17.1).
Megatron's are written by `python -m golden.make.megatron`.
"""

from __future__ import annotations

import argparse
import copy
import shutil
import warnings
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from golden.make.description import describe
from golden.make.engines import shard, take_state
from golden.make.layouts import LAYOUTS
from golden.make.lora import add_adapter, save_truths
from golden.make.models import DTYPES, ValueHeadModel, make_model, randomize
from golden.make.ranks import run_ranks
from golden.make.table import CASES, DEMO, Case

_ROOT = Path(__file__).parents[3]
_PACKAGES = ("torch", "transformers", "peft", "safetensors")


def main() -> None:
    """Write each case that was asked for, from scratch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names that contain this text")
    parser.add_argument("--out", type=Path, default=_ROOT / "tests" / "golden" / "cases")
    parser.add_argument("--describe", action="store_true", help="rewrite case.json alone, after a change of the table")
    parser.add_argument("--demo", action="store_true", help="write the checkpoints of `unshard demo` instead")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.utils.logging.disable_progress_bar()
    if arguments.demo:
        write_demo(_ROOT / "src" / "unshard" / "demo_data")
        return
    installed = int(transformers.__version__.partition(".")[0])
    for case in CASES:
        if arguments.only in case.name and case.transformers == installed:
            if not arguments.describe:
                write_case(case, arguments.out / case.name)
            describe(case, arguments.out / case.name, _PACKAGES)
            print(case.name, flush=True)


def write_case(case: Case, directory: Path) -> None:
    """Write `ckpt/` and the truths of one case."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    model = make_model(case.model, dtype=case.dtype, tied=case.tied, task=case.task, seed=case.seed)
    model.save_pretrained(directory / "truth")
    trained = _prepare(model, case, directory)
    run_ranks(_train_rank, case.world, trained, model, case, directory / "ckpt")


def write_demo(directory: Path) -> None:
    """Write the run directories that the package carries: checkpoints alone, as a trainer leaves them."""
    shutil.rmtree(directory, ignore_errors=True)
    for case in DEMO:
        run = directory / case.name
        model = make_model(case.model, dtype=case.dtype, tied=case.tied, task=case.task, seed=case.seed)
        trained = add_adapter(model, case.lora, DTYPES[case.dtype], case.seed) if case.lora else model
        run_ranks(_train_rank, case.world, trained, model, case, run / "global_step_100" / "actor")
        (run / "latest_checkpointed_iteration.txt").write_text("100")


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


def _train_rank(rank: int, trained: nn.Module, model: PreTrainedModel, case: Case, directory: Path) -> None:
    """One rank's part: shard, and save what this rank holds. No step is taken: the values are the truth's."""
    state = take_state(shard(trained, case), case)
    LAYOUTS[case.layout](directory, rank, case, state, model)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
