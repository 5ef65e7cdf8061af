"""LoRA in every kind that PEFT trains, and the truths that belong to it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Lora:
    """An adapter: `options` go to PEFT's LoraConfig as they are.

    facts: what the checkpoint tells of it: verl's "meta" file, PEFT's own config ("peft"), or "none".
    """

    rank: int = 4
    alpha: int = 8
    targets: tuple[str, ...] = ("q_proj", "v_proj", "down_proj")
    options: Mapping[str, Any] = field(default_factory=dict)
    facts: str = "meta"

    def peft_config(self) -> LoraConfig:
        """The configuration that PEFT trains with."""
        return LoraConfig(
            r=self.rank, lora_alpha=self.alpha, target_modules=list(self.targets), task_type="CAUSAL_LM", **self.options
        )


def add_adapter(model: PreTrainedModel, lora: Lora, dtype: torch.dtype, seed: int) -> PeftModel:
    """Wrap `model`; every trainable tensor gets random values, for PEFT starts with a B of zeros."""
    wrapped = get_peft_model(model, lora.peft_config()).to(dtype)
    generator = torch.Generator().manual_seed(seed + 99)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.05
            if "lora_magnitude_vector" in name:
                parameter.mul_((1 + noise).to(parameter.dtype))
            elif parameter.requires_grad:
                parameter.copy_(noise.to(parameter.dtype))
    return wrapped


def save_truths(wrapped: PeftModel, case_directory: Path, dtype: torch.dtype) -> None:
    """Write `truth_adapter/` (by PEFT) and `truth_merged/` (fused in fp32, then rounded to `dtype`)."""
    wrapped.save_pretrained(case_directory / "truth_adapter")
    (case_directory / "truth_adapter" / "README.md").unlink()
    merged = copy.deepcopy(wrapped).float().merge_and_unload().to(dtype)
    merged.config.dtype = dtype
    merged.save_pretrained(case_directory / "truth_merged")
