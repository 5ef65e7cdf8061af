"""Qwen3-Next and Qwen3.5: gated delta nets between layers of gated attention.

Megatron trains both with `--apply-layernorm-1p`: its norms hold the weight less one, as the files do, save the delta
net's own norm, whose whole weight lies in the files.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.from_hf.llama import State, outer
from megatron.from_hf.moe import mlp


def to_megatron(state: State, config: Any) -> State:
    """The whole Megatron tensors."""
    full = outer(state)
    for layer in range(config.num_hidden_layers):
        hf, meg = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        full[f"{meg}input_layernorm.weight"] = state[f"{hf}input_layernorm.weight"]
        full[f"{meg}pre_mlp_layernorm.weight"] = state[f"{hf}post_attention_layernorm.weight"]
        if f"{hf}self_attn.q_proj.weight" in state:
            full |= gated_attention(state, config, f"{hf}self_attn.", f"{meg}self_attention.")
        else:
            full |= delta_net(state, config, f"{hf}linear_attn.", f"{meg}self_attention.")
        full |= mlp(state, hf, meg)
    return full


def gated_attention(state: State, config: Any, hf: str, meg: str) -> State:
    """Each group: its queries, their gates, its key, its value. The files have query and gate of a head together."""
    groups, size = config.num_key_value_heads, config.head_dim
    query, gate = state[f"{hf}q_proj.weight"].unflatten(0, (groups, -1, 2, size)).unbind(2)
    key, value = (state[f"{hf}{part}_proj.weight"].unflatten(0, (groups, 1, size)) for part in "kv")
    return {
        f"{meg}linear_qkv.weight": torch.cat([query, gate, key, value], 1).flatten(0, 2),
        f"{meg}linear_proj.weight": state[f"{hf}o_proj.weight"],
        f"{meg}q_layernorm.weight": state[f"{hf}q_norm.weight"],
        f"{meg}k_layernorm.weight": state[f"{hf}k_norm.weight"],
    }


def delta_net(state: State, config: Any, hf: str, meg: str) -> State:
    """`in_proj` is [queries; keys; values; z; beta; alpha]."""
    return {
        f"{meg}in_proj.weight": torch.cat(_projections(state, config, hf)),
        f"{meg}conv1d.weight": state[f"{hf}conv1d.weight"],
        f"{meg}A_log": state[f"{hf}A_log"],
        f"{meg}dt_bias": state[f"{hf}dt_bias"],
        f"{meg}out_norm.weight": (state[f"{hf}norm.weight"].float() - 1).to(state[f"{hf}norm.weight"].dtype),
        f"{meg}out_proj.weight": state[f"{hf}out_proj.weight"],
    }


def _projections(state: State, config: Any, hf: str) -> list[torch.Tensor]:
    if f"{hf}in_proj_qkv.weight" in state:  # Qwen3.5
        return [state[f"{hf}in_proj_{part}.weight"] for part in ("qkv", "z", "b", "a")]
    keys, ratio = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    values = ratio * config.linear_value_head_dim
    by_key_head = state[f"{hf}in_proj_qkvz.weight"].unflatten(0, (keys, -1))
    qkvz = by_key_head.split([config.linear_key_head_dim] * 2 + [values] * 2, 1)
    ba = state[f"{hf}in_proj_ba.weight"].unflatten(0, (keys, -1)).split([ratio] * 2, 1)
    return [part.flatten(0, 1) for part in (*qkvz, *ba)]
