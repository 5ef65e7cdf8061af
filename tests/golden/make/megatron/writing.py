"""One golden checkpoint of Megatron: the truth, and what the ranks save."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from golden.make.megatron.engine import build, logits, start
from golden.make.megatron.families import FAMILIES, make_model
from golden.make.megatron.saving import save
from golden.make.megatron.stand_ins import stand_in
from golden.make.megatron.table import MegatronCase
from golden.make.models import save_side_files
from golden.make.ranks import run_ranks

_TOKENS = torch.arange(3, 19)[None]

_TOLERANCE = {"fp32": 1e-5, "bf16": 0.03, "fp16": 0.004}
"""Logits lie around one; the rounding of each layer's results goes through all layers behind it."""


def write_megatron_case(case: MegatronCase, directory: Path) -> None:
    """Write `ckpt/`, `truth/` and `hf/`; where one stage is the whole model, megatron-core must compute the truth."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    stand_in()
    model = make_model(case.model, layers=case.layers, dtype=case.dtype, tied=case.tied, seed=case.seed, mtp=case.mtp)
    model.save_pretrained(directory / "truth")
    save_side_files(model, directory / "hf")
    state = load_file(directory / "truth" / "model.safetensors")
    if case.mtp and case.model != "mimo":
        state |= _further_layers(state, model.config, case)
        save_file(state, directory / "truth" / "model.safetensors", metadata={"format": "pt"})
    full = FAMILIES[case.model].to_megatron(state, model.config)
    with torch.no_grad():
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")
        truth = model(_TOKENS).logits
    run_ranks(_train_rank, case.world, case, model, full, truth, directory / "ckpt")


def _further_layers(state: dict[str, torch.Tensor], config: Any, case: MegatronCase) -> dict[str, torch.Tensor]:
    """Layers that predict further tokens, which transformers leaves out: like the last layer, of other values."""
    generator = torch.Generator().manual_seed(case.seed + 99)
    last, hidden = config.num_hidden_layers - 1, config.hidden_size
    shapes = {name: tensor for name, tensor in state.items() if name.startswith(f"model.layers.{last}.")}
    further = {}
    for number in range(config.num_hidden_layers, config.num_hidden_layers + case.mtp):
        module = f"model.layers.{number}."
        own = {"eh_proj": (hidden, 2 * hidden), "enorm": (hidden,), "hnorm": (hidden,), "shared_head.norm": (hidden,)}
        dtype = state["model.embed_tokens.weight"].dtype
        for name, shape in own.items():
            further[f"{module}{name}.weight"] = (torch.randn(shape, generator=generator) * 0.05).to(dtype)
        for name, tensor in shapes.items():
            values = torch.randn(tensor.shape, generator=generator) * 0.05
            further[name.replace(f".{last}.", f".{number}.", 1)] = values.to(tensor.dtype)
    return further


def _train_rank(
    rank: int,
    case: MegatronCase,
    model: PreTrainedModel,
    full: dict[str, torch.Tensor],
    truth: torch.Tensor,
    directory: Path,
) -> None:
    """One rank's part: build its chunks, let them compute, save. No step is taken: the values are the truth's."""
    start(case)
    chunks = build(case, model.config, full)
    if case.pp == case.vpp == 1 and not case.grouped:  # whose kernel needs CUDA
        found = logits(chunks[0], _TOKENS)[..., : truth.shape[-1]]
        far = float((found.float() - truth.float()).abs().max())
        if not far < _TOLERANCE[case.dtype]:
            raise ValueError(f"{case.name}: rank {rank} computes logits that lie {far:.2g} beside the truth's")
    dist.barrier()
    save(directory, case, chunks, model.config.vocab_size)
