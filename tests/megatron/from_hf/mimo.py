"""MiMo: Qwen 2 and MTP layers, whose projection takes [hidden state, embedding], Megatron's the other way round.

The model is not in transformers: its classes, as those that lie beside the weights name their parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Model
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

from megatron.from_hf import llama
from megatron.from_hf.llama import State


class MiMoConfig(Qwen2Config):
    """Qwen 2's, which counts MTP layers too."""

    model_type = "mimo"
    num_nextn_predict_layers: int = 0


class _Layer(Qwen2DecoderLayer):
    def __init__(self, config: MiMoConfig) -> None:
        super().__init__(config, layer_idx=0)
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            setattr(self, name, Qwen2RMSNorm(config.hidden_size))
        self.input_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)


class MiMoModel(Qwen2Model):
    """Qwen 2's, with MTP layers that `forward` does not need."""

    config_class = MiMoConfig

    def __init__(self, config: MiMoConfig) -> None:
        super().__init__(config)
        self.mtp_layers = nn.ModuleList([_Layer(config) for _ in range(config.num_nextn_predict_layers)])
        self.post_init()


class MiMoForCausalLM(Qwen2ForCausalLM):
    """Qwen 2's, with that model."""

    config_class = MiMoConfig

    def __init__(self, config: MiMoConfig) -> None:
        super().__init__(config)
        self.model = MiMoModel(config)
        self.post_init()


def to_megatron(state: State, config: Any) -> State:
    """The whole Megatron tensors."""
    full = llama.to_megatron(state, config)
    for layer in range(config.num_nextn_predict_layers):
        hf, meg = f"model.mtp_layers.{layer}.", f"mtp.layers.{layer}."
        hidden, token = state[f"{hf}input_proj.weight"].chunk(2, dim=1)
        full[f"{meg}eh_proj.weight"] = torch.cat([token, hidden], dim=1)
        full[f"{meg}enorm.weight"] = state[f"{hf}token_layernorm.weight"]
        full[f"{meg}hnorm.weight"] = state[f"{hf}hidden_layernorm.weight"]
        full[f"{meg}final_layernorm.weight"] = state[f"{hf}final_layernorm.weight"]
        inner = f"{meg}transformer_layer."
        full |= llama.attention(state, config, hf, inner)
        full[f"{inner}pre_mlp_layernorm.weight"] = state[f"{hf}post_attention_layernorm.weight"]
        full |= llama.gated_mlp(state, f"{hf}mlp.", f"{inner}mlp.")
    return full
