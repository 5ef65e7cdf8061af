"""gpt-oss: attention sinks, biases everywhere, experts whose gate and up columns alternate."""

from __future__ import annotations

from typing import Any

import torch

from megatron.from_hf.llama import State, attention, outer


def to_megatron(state: State, config: Any) -> State:
    """The whole Megatron tensors."""
    full = outer(state)
    for layer in range(config.num_hidden_layers):
        hf, meg = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        full |= attention(state, config, hf, meg)
        full[f"{meg}self_attention.linear_proj.bias"] = state[f"{hf}self_attn.o_proj.bias"]
        full[f"{meg}self_attention.core_attention.softmax_offset"] = state[f"{hf}self_attn.sinks"]
        full[f"{meg}pre_mlp_layernorm.weight"] = state[f"{hf}post_attention_layernorm.weight"]
        for kind in ("weight", "bias"):
            full[f"{meg}mlp.router.{kind}"] = state[f"{hf}mlp.router.{kind}"]
        full |= experts(state, f"{hf}mlp.experts.", f"{meg}mlp.experts.local_experts.")
    return full


def experts(state: State, hf: str, meg: str) -> State:
    """Experts, each transposed, its even columns (gates) before the odd ones (ups)."""
    full: State = {}
    for expert, columns in enumerate(state[f"{hf}gate_up_proj"]):
        bias = state[f"{hf}gate_up_proj_bias"][expert]
        full |= {
            f"{meg}{expert}.linear_fc1.weight": torch.cat([columns[:, 0::2], columns[:, 1::2]], 1).T.contiguous(),
            f"{meg}{expert}.linear_fc1.bias": torch.cat([bias[0::2], bias[1::2]]),
            f"{meg}{expert}.linear_fc2.weight": state[f"{hf}down_proj"][expert].T.contiguous(),
            f"{meg}{expert}.linear_fc2.bias": state[f"{hf}down_proj_bias"][expert],
        }
    return full
