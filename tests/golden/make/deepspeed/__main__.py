"""Write DeepSpeed's golden checkpoints: in `tests/`, `python -m golden.make.deepspeed [--only TEXT] [--out DIRECTORY]`.

DeepSpeed trains for a step and saves, on gloo and without CUDA. Runs by hand, takes two minutes on two cores, needs the
packages of `make test` and deepspeed 0.19.8.
"""

from __future__ import annotations

import os

import torch

os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported

from golden.make.command import make_parser, write_cases
from golden.make.deepspeed.table import CASES
from golden.make.deepspeed.training import write_deepspeed_case

_PACKAGES = ("torch", "transformers", "peft", "deepspeed", "safetensors")

if __name__ == "__main__":
    torch.set_num_threads(1)
    write_cases(make_parser(__doc__).parse_args(), CASES, _PACKAGES, write_deepspeed_case)
