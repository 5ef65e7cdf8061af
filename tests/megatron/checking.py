"""The proof of a family: a random model, written as Megatron would, must come out of `unshard merge` unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers import PreTrainedModel

from golden.make.models import randomize
from megatron.writer import write_legacy, write_torch_dist
from unshard.cli import main

ToMegatron = Callable[[dict[str, torch.Tensor], Any], dict[str, torch.Tensor]]
"""Tensors under the names of the Hugging Face files, and the model's config, to whole Megatron tensors."""

TOKENS = (1, 9, 3, 16, 8, 2, 11)


def random_model(config: Any, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A causal language model (or whatever `config.architectures` names) whose every parameter is random."""
    torch.manual_seed(seed)
    named = getattr(config, "architectures", None)
    build = getattr(transformers, named[0])._from_config if named else transformers.AutoModelForCausalLM.from_config
    model: PreTrainedModel = build(config).to(dtype).eval()
    randomize(model, seed)
    model.tie_weights()
    model.config.dtype = dtype
    return model


def merge_and_compare(
    model: PreTrainedModel,
    to_megatron: ToMegatron,
    place: Path,
    *,
    write: str = "legacy",
    options: Sequence[str] = (),
    logits: bool = True,
    **layout: Any,
) -> Path:
    """Save the model as Megatron would, merge it, and compare bit for bit, and the logits; returns the output.

    write:   "legacy" or "torch_dist"; `layout` goes to `write_legacy` or `write_torch_dist`.
    options: typed after SRC and OUT, beside `--config`.
    logits:  load the output in transformers and compare what it computes, up to the order of sums.
    """
    truth, output = place / "truth", place / "output"
    model.save_pretrained(truth)
    state = read_model(truth)
    full = to_megatron(dict(state), model.config)
    {"legacy": write_legacy, "torch_dist": write_torch_dist}[write](place / "checkpoint", full, **layout)
    typed = ["merge", str(place / "checkpoint"), str(output), "--config", str(truth), *options]
    assert main(typed) == 0, f"unshard {' '.join(typed)} failed"
    assert_same(read_model(output), state)
    if logits:
        torch.testing.assert_close(_compute(_load(output, model)), _compute(model), rtol=1e-4, atol=1e-5)
    return output


def read_model(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model's safetensors files."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_same(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
    """The same names, types, shapes and bits."""
    assert sorted(found) == sorted(truth)
    for name, tensor in truth.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(_bits(found[name]), _bits(tensor)), f"{name}: other values"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _load(directory: Path, like: PreTrainedModel) -> PreTrainedModel:
    """Load with the class of `like`; every weight must be found, and none be left over."""
    model, loading = type(like).from_pretrained(directory, output_loading_info=True, dtype="auto")
    left = {kind: loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if loading[kind]}
    assert not left, json.dumps({kind: sorted(map(str, names)) for kind, names in left.items()})
    result: PreTrainedModel = model.eval()
    return result


@torch.no_grad()
def _compute(model: PreTrainedModel) -> torch.Tensor:
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped kernel wants rows of whole 16 bytes
    result: torch.Tensor = model(input_ids=torch.tensor([TOKENS])).logits
    return result
