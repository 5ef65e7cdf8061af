"""StarCoder 2: Llama's attention with biases everywhere, norms with biases, an MLP without gates."""

from __future__ import annotations

from typing import Any

from megatron.from_hf.llama import State, attention, outer


def to_megatron(state: State, config: Any) -> State:
    """The whole Megatron tensors."""
    full = outer(state)
    full["decoder.final_layernorm.bias"] = state["model.norm.bias"]
    for layer in range(config.num_hidden_layers):
        hf, meg = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        full |= attention(state, config, hf, meg)
        names = {
            "input_layernorm.bias": "input_layernorm.bias",
            "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
            "pre_mlp_layernorm.bias": "post_attention_layernorm.bias",
            "mlp.linear_fc1.weight": "mlp.c_fc.weight",
            "mlp.linear_fc1.bias": "mlp.c_fc.bias",
            "mlp.linear_fc2.weight": "mlp.c_proj.weight",
            "mlp.linear_fc2.bias": "mlp.c_proj.bias",
        }
        full |= {meg + ours: state[hf + theirs] for ours, theirs in names.items() if hf + theirs in state}
    return full
