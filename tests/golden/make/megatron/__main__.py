"""Write Megatron's golden checkpoints: in `tests/`, `python -m golden.make.megatron [--only TEXT] [--out DIRECTORY]`.

megatron-core writes them itself, on gloo and without CUDA; see `stand_ins.py`. Runs by hand, takes two minutes on two
cores, needs `make test`'s packages and those of the dependency group `golden`.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch
import transformers

from golden.make.description import describe
from golden.make.megatron.table import CASES
from golden.make.megatron.writing import write_megatron_case

_CASES = Path(__file__).parents[2] / "cases"
_PACKAGES = ("torch", "transformers", "megatron-core", "safetensors")


def main() -> None:
    """Write each case that was asked for, from scratch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names that contain this text")
    parser.add_argument("--out", type=Path, default=_CASES)
    parser.add_argument("--describe", action="store_true", help="rewrite case.json alone, after a change of the table")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.utils.logging.disable_progress_bar()
    for case in CASES:
        if arguments.only in case.name:
            if not arguments.describe:
                write_megatron_case(case, arguments.out / case.name)
            describe(case, arguments.out / case.name, _PACKAGES)
            print(case.name, flush=True)


if __name__ == "__main__":  # megatron-core starts processes that import this module again
    torch.set_num_threads(1)
    main()
