"""Gemma 1, 2 and 3, by Megatron-Bridge's model providers and HF's modules: which norm stands where.

Gemma 2 and 3 have norms behind both projections that go back to the residual stream, which Megatron keeps as parts of
those projections (`TERowParallelLinearLayerNorm`). All norms multiply by 1 + weight on both sides.
"""

from __future__ import annotations

from typing import Any

from megatron.from_hf import llama
from megatron.from_hf.llama import State

_NORMS = {
    "post_attention_layernorm": "self_attention.linear_proj.post_layernorm",
    "pre_feedforward_layernorm": "pre_mlp_layernorm",
    "post_feedforward_layernorm": "mlp.linear_fc2.post_layernorm",
}


def to_megatron(state: State, config: Any) -> State:
    """The whole Megatron tensors of a language model."""
    text = config.get_text_config()
    if text.model_type == "gemma":
        return llama.to_megatron(state, text)
    full = llama.outer(state)
    for layer in range(text.num_hidden_layers):
        hf, meg = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        full |= llama.attention(state, text, hf, meg)
        full |= llama.gated_mlp(state, f"{hf}mlp.", f"{meg}mlp.")
        full |= {f"{meg}{ours}.weight": state[f"{hf}{theirs}.weight"] for theirs, ours in _NORMS.items()}
    return full


def vision_to_megatron(state: State, config: Any) -> State:
    """The whole Megatron tensors of a model with a vision tower, which Megatron-Bridge takes from transformers."""
    text = {name.removeprefix("language_model."): value for name, value in state.items() if "language_model." in name}
    full = {f"language_model.{name}": value for name, value in to_megatron(text, config).items()}
    for name, value in state.items():
        if name.startswith("vision_tower."):
            full[name.replace("vision_tower.vision_model.", "vision_tower.")] = value
    projector = "multi_modal_projector."
    full[f"{projector}proj.weight"] = state[f"{projector}mm_input_projection_weight"].T.contiguous()
    full[f"{projector}mm_soft_embed_norm.weight"] = state[f"{projector}mm_soft_emb_norm.weight"]
    return full


def shift_norms(full: State, by: float) -> State:
    """Every norm's weight changed by a constant: what NeMo 1 did to Gemma's, so that they multiply by the weight."""
    return {name: value + by if "norm" in name and name.endswith("weight") else value for name, value in full.items()}
