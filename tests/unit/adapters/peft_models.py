"""Tiny models under PEFT, trained (by chance), and what PEFT itself makes of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from reference import Array, Disk
from unshard import dtypes
from unshard.checkpoint import Checkpoint
from unshard.dtypes import DType
from unshard.model import Adapter
from unshard.run.functions import apply
from unshard.tensors import Box, Chunk, Tensor, Value

_BY_TORCH_NAME: dict[str, DType] = {
    value.torch_name: value for value in vars(dtypes).values() if isinstance(value, DType)
}


def build(architecture: str, *, tied: bool = False) -> Any:
    """A model of two layers with random weights, the same at each call."""
    import torch
    import transformers

    torch.manual_seed(1)
    sizes = {
        "vocab_size": 37,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "tie_word_embeddings": tied,
    }
    if architecture == "gpt2":
        config = transformers.GPT2Config(vocab_size=37, n_embd=16, n_layer=2, n_head=2, n_positions=32)
        return transformers.GPT2LMHeadModel(config).eval()
    if architecture == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(
            **sizes,
            intermediate_size=24,
            moe_intermediate_size=12,
            num_experts=4,
            num_experts_per_tok=2,
            num_key_value_heads=1,
            head_dim=8,
        )
        return transformers.Qwen3MoeForCausalLM(config).eval()
    config = transformers.Qwen2Config(**sizes, intermediate_size=24, num_key_value_heads=1)
    if architecture == "qwen2_tokens":
        return transformers.Qwen2ForTokenClassification(config).eval()
    return transformers.Qwen2ForCausalLM(config).eval()


@dataclass
class Trained:
    """A PEFT model after training, and the model it was made from."""

    original: Any
    model: Any

    def state(self) -> dict[str, Any]:
        return dict(self.model.state_dict())

    def config(self, adapter: str = "default") -> dict[str, Any]:
        """What PEFT writes to adapter_config.json."""
        facts: dict[str, Any] = json.loads(
            json.dumps(self.model.peft_config[adapter].to_dict(), default=lambda value: sorted(value))
        )
        return facts


def train(original: Any, *configs: Any, names: tuple[str, ...] = ("default",)) -> Trained:
    """The model under PEFT with random adapters (fresh ones have no effect)."""
    import torch
    from peft import get_peft_model

    model = get_peft_model(copy.deepcopy(original), configs[0], adapter_name=names[0])
    for name, config in zip(names[1:], configs[1:], strict=True):
        model.add_adapter(name, config)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("lora_", "modules_to_save", "trainable_tokens_delta")):
                noise = torch.randn(parameter.shape) * 0.3
                parameter.add_(noise.to(parameter.dtype))
    return Trained(original, model.eval())


def store(state: Mapping[str, Any], disk: Disk) -> dict[str, Tensor]:
    """A state dict as a catalog over a disk in memory, in chunks of rows as FSDP leaves them."""
    tensors = {}
    for name, value in state.items():
        dtype = _BY_TORCH_NAME[str(value.dtype).removeprefix("torch.")]
        array = to_numpy(value)
        half = (array.shape[0] + 1) // 2 if array.ndim else 0
        boxes = [Box.whole(array.shape)]
        if array.ndim and half < array.shape[0]:
            boxes = [
                Box((start, *[0] * (array.ndim - 1)), (stop - start, *array.shape[1:]))
                for start, stop in ((0, half), (half, array.shape[0]))
            ]
        chunks = []
        for rank, box in enumerate(boxes):
            where = tuple([slice(low, high) for low, high in zip(box.offsets, box.stops, strict=True)])
            chunks.append(Chunk(box, disk.save(array[where], dtype, f"rank_{rank}"), rank))
        tensors[name] = Tensor(name, dtype, array.shape, tuple(chunks))
    return tensors


def checkpoint(tensors: Mapping[str, Tensor], adapter: Mapping[str, Any] | None, **facts: Any) -> Checkpoint:
    return Checkpoint("test", "a test", {}, tensors, adapter=adapter, **facts)


def to_numpy(value: Any) -> Array:
    """The bits of a torch tensor."""
    import torch

    value = value.detach().contiguous()
    if value.dtype == torch.bfloat16:
        return np.asarray(value.view(torch.uint16).numpy()).view(dtypes.BF16.numpy)
    return np.asarray(value.numpy())


def to_torch(array: Array) -> Any:
    import torch

    if array.dtype == dtypes.BF16.numpy:
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def evaluate(value: Value, disk: Disk) -> Array:
    """A tensor's elements, assembled or computed."""
    if isinstance(value, Tensor):
        return disk.assemble(value)
    inputs = [disk.assemble(tensor) for tensor in value.inputs]
    return apply(value.function, inputs, value.parameters).astype(value.dtype.numpy)


def write(adapter: Adapter, disk: Disk, directory: Path) -> Path:
    """A PEFT directory."""
    from safetensors.torch import save_file

    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps(dict(adapter.config), indent=2, sort_keys=True))
    tensors = {name: to_torch(disk.assemble(tensor)) for name, tensor in adapter.tensors.items()}
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
    return directory


def same_bits(found: Array, expected: Any) -> bool:
    array = to_numpy(expected)
    return found.dtype == array.dtype and found.shape == array.shape and found.tobytes() == array.tobytes()


def logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(input_ids=torch.arange(1, 13).reshape(2, 6)).logits
