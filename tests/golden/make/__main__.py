"""Write the golden checkpoints: in `tests/`, `python -m golden.make [--only TEXT] [--out DIRECTORY]`.

They are written by torch, transformers and peft themselves, on gloo, each with the truth beside it; `case.json` records
the versions. Runs by hand, takes about half a minute on two cores, needs `make test`'s packages; the cases of
transformers 4 are written where that is installed (4.57.6, with peft 0.17.1).
The others are written by `python -m golden.make.dcp`, `golden.make.deepspeed` and `golden.make.megatron`.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import torch
import transformers

from golden.make.command import make_parser, write_cases
from golden.make.lora import add_adapter
from golden.make.models import DTYPES, make_model
from golden.make.ranks import run_ranks
from golden.make.table import CASES, DEMO
from golden.make.writing import train_rank, write_case

_DEMO = Path(__file__).parents[3] / "src" / "unshard" / "demo_data"
_PACKAGES = ("torch", "transformers", "peft", "safetensors")


def main() -> None:
    """Write each case that was asked for, or the demo."""
    parser = make_parser(__doc__)
    parser.add_argument("--demo", action="store_true", help="write the checkpoints of `unshard demo` instead")
    arguments = parser.parse_args()
    if arguments.demo:
        write_demo(_DEMO)
        return
    installed = int(transformers.__version__.partition(".")[0])
    write_cases(arguments, [case for case in CASES if case.transformers == installed], _PACKAGES, write_case)


def write_demo(directory: Path) -> None:
    """Write the run directories that the package carries: checkpoints alone, as a trainer leaves them."""
    warnings.filterwarnings("ignore")
    shutil.rmtree(directory, ignore_errors=True)
    for case in DEMO:
        run = directory / case.name
        model = make_model(case.model, dtype=case.dtype, tied=case.tied, task=case.task, seed=case.seed)
        trained = add_adapter(model, case.lora, DTYPES[case.dtype], case.seed) if case.lora else model
        run_ranks(train_rank, case.world, trained, model, case, run / "global_step_100" / "actor")
        (run / "latest_checkpointed_iteration.txt").write_text("100")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
