"""GLM 4 of 0414: gates and ups in one matrix, norms behind attention and MLP (THUDM/slime, `glm4.py`)."""

from __future__ import annotations

from typing import Any

from megatron.from_hf import llama
from megatron.from_hf.llama import State


def to_megatron(state: State, config: Any) -> State:
    """The whole Megatron tensors."""
    full = llama.outer(state)
    for layer in range(config.num_hidden_layers):
        hf, meg = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        full |= llama.attention(state, config, hf, meg)
        full[f"{meg}post_self_attn_layernorm.weight"] = state[f"{hf}post_self_attn_layernorm.weight"]
        full[f"{meg}pre_mlp_layernorm.weight"] = state[f"{hf}post_attention_layernorm.weight"]
        full[f"{meg}mlp.linear_fc1.weight"] = state[f"{hf}mlp.gate_up_proj.weight"]
        full[f"{meg}mlp.linear_fc2.weight"] = state[f"{hf}mlp.down_proj.weight"]
        full[f"{meg}post_mlp_layernorm.weight"] = state[f"{hf}post_mlp_layernorm.weight"]
    return full
