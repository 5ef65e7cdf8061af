"""Phi-3 and Phi-4: Llama whose files keep [q; k; v] and [gate; up] in one tensor each."""

from __future__ import annotations

from typing import Any

from megatron.from_hf import llama
from megatron.from_hf.llama import State


def to_megatron(state: State, config: Any) -> State:
    """The whole Megatron tensors."""
    size = config.hidden_size // config.num_attention_heads
    rows = [heads * size for heads in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
    apart = dict(state)
    for layer in range(config.num_hidden_layers):
        module = f"model.layers.{layer}."
        parts = apart.pop(f"{module}self_attn.qkv_proj.weight").split(rows)
        apart |= {f"{module}self_attn.{name}_proj.weight": part for name, part in zip("qkv", parts, strict=True)}
        halves = apart.pop(f"{module}mlp.gate_up_proj.weight").chunk(2)
        apart |= {f"{module}mlp.{name}_proj.weight": half for name, half in zip(("gate", "up"), halves, strict=True)}
    return llama.to_megatron(apart, config)
