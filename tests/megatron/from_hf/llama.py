"""Llama and its kin (Mistral, Qwen2, Qwen3) in Megatron's names and layouts.

The example for other families: plain torch, from the framework's own classes, without the rules under test.
"""

from __future__ import annotations

from typing import Any

import torch

State = dict[str, torch.Tensor]


def to_megatron(state: State, config: Any) -> State:
    """The whole Megatron tensors (local spec's names, global layers) of a Hugging Face model's tensors."""
    full = outer(state)
    for layer in range(config.num_hidden_layers):
        hf, meg = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        full |= attention(state, config, hf, meg)
        full[f"{meg}pre_mlp_layernorm.weight"] = state[f"{hf}post_attention_layernorm.weight"]
        full |= gated_mlp(state, f"{hf}mlp.", f"{meg}mlp.")
    return full


def outer(state: State) -> State:
    """Embedding, final norm and head; a tied model has no head."""
    names = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": "lm_head.weight",
    }
    return {meg: state[hf] for meg, hf in names.items() if hf in state}


def attention(state: State, config: Any, hf: str, meg: str) -> State:
    """Norm, projections and, where there are any, q/k norms of one layer's attention."""
    full = {f"{meg}input_layernorm.weight": state[f"{hf}input_layernorm.weight"]}
    full |= linear(state, f"{hf}self_attn.o_proj", f"{meg}self_attention.linear_proj")
    for kind in ("weight", "bias"):
        if f"{hf}self_attn.q_proj.{kind}" in state:
            parts = [state[f"{hf}self_attn.{part}_proj.{kind}"] for part in "qkv"]
            full[f"{meg}self_attention.linear_qkv.{kind}"] = group_qkv(parts, config.num_key_value_heads)
    for part in "qk":
        if f"{hf}self_attn.{part}_norm.weight" in state:
            full[f"{meg}self_attention.{part}_layernorm.weight"] = state[f"{hf}self_attn.{part}_norm.weight"]
    return full


def group_qkv(parts: list[torch.Tensor], groups: int) -> torch.Tensor:
    """Group after group: the group's query heads, its key head, its value head."""
    by_group = [part.unflatten(0, (groups, -1)) for part in parts]
    return torch.cat(by_group, 1).flatten(0, 1)


def linear(state: State, hf: str, meg: str) -> State:
    """A layer's weight and, where there is one, its bias."""
    return {f"{meg}.{kind}": state[f"{hf}.{kind}"] for kind in ("weight", "bias") if f"{hf}.{kind}" in state}


def gated_mlp(state: State, hf: str, meg: str) -> State:
    """A SwiGLU MLP: gate above up."""
    full = linear(state, f"{hf}down_proj", f"{meg}linear_fc2")
    for kind in ("weight", "bias"):
        if f"{hf}gate_proj.{kind}" in state:
            halves = [state[f"{hf}gate_proj.{kind}"], state[f"{hf}up_proj.{kind}"]]
            full[f"{meg}linear_fc1.{kind}"] = torch.cat(halves)
    return full
