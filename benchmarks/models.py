"""The models that are merged: a Llama or a Qwen2 of random weights, always the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np

_BLOCK = 1 << 22
"""Random numbers drawn per model; each tensor is a rotation of them, which is quicker."""


@dataclass(frozen=True)
class Shape:
    """The architecture of a model: so many hidden layers of so many channels.

    groups: key and value heads; as many as query heads, by default, and fewer with grouped queries.
    dtype:  of every tensor, as safetensors calls it.
    biased: whether query, key and value have biases: then it is a Qwen2, else a Llama.
    """

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    heads: int
    groups: int
    dtype: Literal["F32", "BF16"]
    biased: bool = False

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "F32" else 2

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes in the order of the model."""
        wide, narrow, grouped = self.intermediate, self.hidden, self.groups * self.head_size
        yield "model.embed_tokens.weight", (self.vocabulary, narrow)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            for name, rows in (("q", narrow), ("k", grouped), ("v", grouped)):
                yield f"{prefix}.self_attn.{name}_proj.weight", (rows, narrow)
                if self.biased:
                    yield f"{prefix}.self_attn.{name}_proj.bias", (rows,)
            yield f"{prefix}.self_attn.o_proj.weight", (narrow, narrow)
            yield f"{prefix}.mlp.gate_proj.weight", (wide, narrow)
            yield f"{prefix}.mlp.up_proj.weight", (wide, narrow)
            yield f"{prefix}.mlp.down_proj.weight", (narrow, wide)
            yield f"{prefix}.input_layernorm.weight", (narrow,)
            yield f"{prefix}.post_attention_layernorm.weight", (narrow,)
        yield "model.norm.weight", (narrow,)
        yield "lm_head.weight", (self.vocabulary, narrow)

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum([self.itemsize * prod(shape) for _, shape in self.tensors()])

    def config(self) -> dict[str, Any]:
        """config.json."""
        return {
            "architectures": ["Qwen2ForCausalLM" if self.biased else "LlamaForCausalLM"],
            "model_type": "qwen2" if self.biased else "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups,
            "head_dim": self.head_size,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "float32" if self.dtype == "F32" else "bfloat16",
        }

    def draw(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every tensor in the order of the model, always the same; its bits where numpy has no such type (bf16)."""
        block = np.random.default_rng(self.hidden).standard_normal(_BLOCK, dtype=np.float32) * np.float32(0.02)
        if self.dtype == "BF16":
            block = (block.view(np.uint32) >> 16).astype(np.uint16)
        for number, (name, sizes) in enumerate(self.tensors()):
            yield name, np.resize(np.roll(block, 7919 * number), prod(sizes)).reshape(sizes)
