"""Write Megatron's golden checkpoints: in `tests/`, `python -m golden.make.megatron [--only TEXT] [--out DIRECTORY]`.

megatron-core writes them itself, on gloo and without CUDA; see `stand_ins.py`. Runs by hand, takes two minutes on two
cores, needs `make test`'s packages.
"""

from __future__ import annotations

import torch

from golden.make.command import make_parser, write_cases
from golden.make.megatron.table import CASES
from golden.make.megatron.writing import write_megatron_case

_PACKAGES = ("torch", "transformers", "megatron-core", "safetensors")

if __name__ == "__main__":  # megatron-core starts processes that import this module again
    torch.set_num_threads(1)
    write_cases(make_parser(__doc__).parse_args(), CASES, _PACKAGES, write_megatron_case)
