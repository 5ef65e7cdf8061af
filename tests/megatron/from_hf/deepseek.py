"""Latent attention, and layers that predict further tokens: DeepSeek-V2 and V3, Kimi-K2, Moonlight; GLM-4.5's MTP."""

from __future__ import annotations

from typing import Any

from megatron.from_hf.llama import State, attention, outer
from megatron.from_hf.moe import mlp

_LATENT = {
    "q_proj.weight": "linear_q_proj.weight",
    "q_a_proj.weight": "linear_q_down_proj.weight",
    "q_a_layernorm.weight": "q_layernorm.weight",
    "q_b_proj.weight": "linear_q_up_proj.weight",
    "kv_a_proj_with_mqa.weight": "linear_kv_down_proj.weight",
    "kv_a_layernorm.weight": "kv_layernorm.weight",
    "kv_b_proj.weight": "linear_kv_up_proj.weight",
    "o_proj.weight": "linear_proj.weight",
}


def to_megatron(state: State, config: Any) -> State:
    """The whole Megatron tensors; layers behind `num_hidden_layers` predict further tokens."""
    full = outer(state)
    for layer in range(config.num_hidden_layers):
        full |= decoder_layer(state, config, f"model.layers.{layer}.", f"decoder.layers.{layer}.")
    further = 0
    while f"model.layers.{config.num_hidden_layers + further}.eh_proj.weight" in state:
        hf, meg = f"model.layers.{config.num_hidden_layers + further}.", f"mtp.layers.{further}."
        full |= {f"{meg}{part}.weight": state[f"{hf}{part}.weight"] for part in ("enorm", "hnorm", "eh_proj")}
        full[f"{meg}final_layernorm.weight"] = state[f"{hf}shared_head.norm.weight"]
        full |= decoder_layer(state, config, hf, f"{meg}transformer_layer.")
        further += 1
    return full


def decoder_layer(state: State, config: Any, hf: str, meg: str) -> State:
    """One layer: latent attention, or Llama's."""
    if f"{hf}self_attn.kv_b_proj.weight" in state:
        full = {f"{meg}input_layernorm.weight": state[f"{hf}input_layernorm.weight"]}
        for theirs, ours in _LATENT.items():
            if f"{hf}self_attn.{theirs}" in state:
                full[f"{meg}self_attention.{ours}"] = state[f"{hf}self_attn.{theirs}"]
    else:
        full = attention(state, config, hf, meg)
    full[f"{meg}pre_mlp_layernorm.weight"] = state[f"{hf}post_attention_layernorm.weight"]
    return full | mlp(state, hf, meg)
