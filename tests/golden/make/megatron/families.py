"""Tiny models of the families, and what megatron-core is told to build of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from golden.make.megatron import fields
from golden.make.megatron.fields import Fields
from golden.make.models import DTYPES, randomize
from megatron.from_hf import deepseek, gemma, gpt_oss, llama, mimo, moe, phi3, qwen3_next

_DENSE = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "vocab_size": 38,
}
_SHARED = {"max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "norm_topk_prob": True}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_DELTA_NET = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention"],
}
_GEMMA = {"head_dim": 6, "query_pre_attn_scalar": 6, "attn_logit_softcapping": None, "final_logit_softcapping": None}
"""megatron-core has no soft caps; no weight depends on them."""
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class Family:
    """A family's tiny model.

    config:   a config class of transformers, and the sizes in which the family differs.
    fields:   those of megatron-core's TransformerConfig beside Llama's.
    post_norms: norms behind attention and MLP, which Megatron-Bridge adds to megatron-core's layer spec.
    scaled_embedding: the embedding is multiplied by the root of its size, which no weight shows.
    """

    config: str
    sizes: dict[str, Any]
    to_megatron: Callable[[dict[str, torch.Tensor], Any], dict[str, torch.Tensor]]
    fields: Callable[[Any], Fields] = lambda config: {}
    post_norms: bool = False
    scaled_embedding: bool = False


def make_model(name: str, *, layers: int, dtype: str, tied: bool, seed: int, mtp: int = 0) -> PreTrainedModel:
    """A model whose every parameter is random; routing biases too, which stay in float32.

    `mtp`: the number of layers that predict further tokens; transformers builds them for MiMo alone.
    """
    torch.manual_seed(seed)
    family = FAMILIES[name]
    sizes = _DENSE | _SHARED | {"num_hidden_layers": layers, "tie_word_embeddings": tied} | family.sizes
    if mtp:
        sizes["num_nextn_predict_layers"] = mtp
    if name == "mimo":
        model: PreTrainedModel = mimo.MiMoForCausalLM(mimo.MiMoConfig(**sizes))
    else:
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, family.config)(**sizes))
    model = model.to(DTYPES[dtype]).eval()
    randomize(model, seed)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.data = torch.rand(buffer.shape, generator=torch.Generator().manual_seed(seed)) * 0.1
    model.tie_weights()
    model.config.architectures = [type(model).__name__]
    model.config.dtype = DTYPES[dtype]
    return model


def transformer_config(name: str, config: Any) -> Fields:
    """The fields of megatron-core's TransformerConfig that describe the model."""
    return fields.dense(config) | FAMILIES[name].fields(config)


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaConfig", {}, llama.to_megatron),
    "mistral": Family("MistralConfig", {"head_dim": 8}, llama.to_megatron),
    "qwen2": Family("Qwen2Config", {}, llama.to_megatron, lambda config: {"add_qkv_bias": True}),
    "qwen3": Family("Qwen3Config", {"head_dim": 6}, llama.to_megatron, lambda config: {"qk_layernorm": True}),
    "mimo": Family("", {}, mimo.to_megatron, lambda config: {"add_qkv_bias": True}),
    "phi3": Family("Phi3Config", {}, phi3.to_megatron),
    "gemma2": Family("Gemma2Config", _GEMMA, gemma.to_megatron, fields.gemma, post_norms=True, scaled_embedding=True),
    "gemma3": Family(
        "Gemma3TextConfig",
        _GEMMA | {"rope_parameters": {"sliding_attention": _PLAIN_ROPE, "full_attention": _PLAIN_ROPE}},
        gemma.to_megatron,
        fields.gemma,
        post_norms=True,
        scaled_embedding=True,
    ),
    "mixtral": Family(
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 6},
        moe.to_megatron,
        fields.moe,
    ),
    "qwen2_moe": Family(
        "Qwen2MoeConfig",
        _EXPERTS | {"shared_expert_intermediate_size": 14, "norm_topk_prob": False},
        moe.to_megatron,
        lambda config: fields.moe(config) | fields.shared_expert(config) | {"add_qkv_bias": True},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeConfig",
        _EXPERTS | {"head_dim": 6},
        moe.to_megatron,
        lambda config: fields.moe(config) | {"qk_layernorm": True},
    ),
    "deepseek_v2": Family(
        "DeepseekV2Config",
        _LATENT | _ROUTED | {"q_lora_rank": None, "topk_method": "greedy"},
        deepseek.to_megatron,
        fields.latent,
    ),
    "deepseek_v3": Family(
        "DeepseekV3Config", _LATENT | _ROUTED | {"q_lora_rank": 14}, deepseek.to_megatron, fields.latent
    ),
    "glm4_moe": Family(
        "Glm4MoeConfig",
        _ROUTED | {"head_dim": 8, "attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5},
        deepseek.to_megatron,
        lambda config: fields.deepseek(config) | {"add_qkv_bias": True, "qk_layernorm": True},
    ),
    "qwen3_next": Family(
        "Qwen3NextConfig",
        _EXPERTS | _DELTA_NET | {"shared_expert_intermediate_size": 14},
        qwen3_next.to_megatron,
        lambda config: fields.moe(config) | fields.shared_expert(config) | fields.delta_net(config),
    ),
    "qwen3_5": Family("Qwen3_5TextConfig", _DELTA_NET, qwen3_next.to_megatron, fields.delta_net),
    "gpt_oss": Family(
        "GptOssConfig",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 6,
            "head_dim": 8,
            "rope_parameters": _PLAIN_ROPE,
        },
        gpt_oss.to_megatron,
        fields.gpt_oss,
    ),
}
