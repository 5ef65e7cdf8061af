"""Experts behind Llama's attention, dense layers among them: Mixtral, OLMoE, Qwen2-MoE, Qwen3-MoE."""

from __future__ import annotations

from typing import Any

import torch

from megatron.from_hf.llama import State, attention, gated_mlp, outer

_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


def to_megatron(state: State, config: Any) -> State:
    """The whole Megatron tensors of a Hugging Face model's tensors."""
    full = outer(state)
    for layer in range(config.num_hidden_layers):
        hf, meg = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        full |= attention(state, config, hf, meg)
        full[f"{meg}pre_mlp_layernorm.weight"] = state[f"{hf}post_attention_layernorm.weight"]
        full |= mlp(state, hf, meg)
    return full


def mlp(state: State, hf: str, meg: str) -> State:
    """One layer's MLP, dense or of experts."""
    if f"{hf}mlp.gate_proj.weight" in state:
        return gated_mlp(state, f"{hf}mlp.", f"{meg}mlp.")
    module = f"{hf}block_sparse_moe." if f"{hf}block_sparse_moe.gate.weight" in state else f"{hf}mlp."
    return experts(state, module, f"{meg}mlp.") | shared_experts(state, module, f"{meg}mlp.")


def experts(state: State, hf: str, meg: str) -> State:
    """Router (with the bias of a load balancing without losses, where there is one) and routed experts."""
    full = {f"{meg}router.weight": state[f"{hf}gate.weight"]}
    if f"{hf}gate.e_score_correction_bias" in state:
        full[f"{meg}router.expert_bias"] = state[f"{hf}gate.e_score_correction_bias"]
    gate, up, down = next(names for names in _PROJECTIONS if f"{hf}experts.0.{names[0]}.weight" in state)
    for expert in range(len(state[f"{hf}gate.weight"])):
        source, target = f"{hf}experts.{expert}.", f"{meg}experts.local_experts.{expert}."
        fc1 = torch.cat([state[f"{source}{gate}.weight"], state[f"{source}{up}.weight"]])
        full |= {f"{target}linear_fc1.weight": fc1, f"{target}linear_fc2.weight": state[f"{source}{down}.weight"]}
    return full


def shared_experts(state: State, hf: str, meg: str) -> State:
    """The experts that every token takes, and their gate: `shared_expert` in Qwen's files, else `shared_experts`."""
    full: State = {}
    for name in ("shared_expert", "shared_experts"):
        if f"{hf}{name}.gate_proj.weight" in state:
            full |= gated_mlp(state, f"{hf}{name}.", f"{meg}shared_experts.")
    if f"{hf}shared_expert_gate.weight" in state:
        full[f"{meg}shared_experts.gate_weight"] = state[f"{hf}shared_expert_gate.weight"]
    return full
