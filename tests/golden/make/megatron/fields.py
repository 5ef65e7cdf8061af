"""The fields of megatron-core's TransformerConfig that describe the model of a transformers config."""

from __future__ import annotations

import functools
from typing import Any

import torch.nn.functional as F

Fields = dict[str, Any]


def dense(config: Any) -> Fields:
    """Those of Llama, which all others have too."""
    heads = config.num_attention_heads
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "ffn_hidden_size": config.intermediate_size,
        "layernorm_epsilon": config.rms_norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
    }


def moe(config: Any) -> Fields:
    """Experts routed by a softmax; the probabilities of those chosen sum to one or not."""
    experts = getattr(config, "num_experts", None) or config.num_local_experts
    normalised = getattr(config, "norm_topk_prob", True)
    return {
        "num_moe_experts": experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
        "moe_router_pre_softmax": not normalised,
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "none",
    }


def shared_expert(config: Any) -> Fields:
    """The experts that every token takes, behind a gate."""
    return {
        "moe_shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
    }


def deepseek(config: Any) -> Fields:
    """Experts of DeepSeek's kind, the first layers dense."""
    third = config.model_type in ("deepseek_v3", "glm4_moe")
    fields: Fields = {
        "num_moe_experts": config.n_routed_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": config.n_shared_experts * config.moe_intermediate_size,
        "moe_layer_freq": [int(n >= config.first_k_dense_replace) for n in range(config.num_hidden_layers)],
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        "moe_router_pre_softmax": not third,
        "moe_token_dispatcher_type": "allgather",
        "moe_router_load_balancing_type": "none",
    }
    if third:
        fields |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_dtype": "fp32",
        }
    return fields


def latent(config: Any) -> Fields:
    """Latent attention, and experts of DeepSeek's kind."""
    return deepseek(config) | {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "rope_type": "rope",
        "rotary_base": 10000.0,
        "rotary_percent": 1.0,
    }


def gpt_oss(config: Any) -> Fields:
    """Sinks, biases, and a SwiGLU of its own."""
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    return moe(config) | {
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "activation_func": quick_gelu,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 7.0,
    }


def delta_net(config: Any) -> Fields:
    """Gated delta nets, with attention that is gated too."""
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    return {f"linear_{name}": getattr(config, f"linear_{name}") for name in names} | {
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
        "attention_output_gate": True,
        "deterministic_mode": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(kind == "linear_attention") for kind in config.layer_types],
    }


def gemma(config: Any) -> Fields:
    """Norms centred at zero, GELU gates, and scores scaled by what the config says."""
    return {
        "layernorm_zero_centered_gamma": True,
        "activation_func": functools.partial(F.gelu, approximate="tanh"),
        "softmax_scale": config.query_pre_attn_scalar**-0.5,
        "qk_layernorm": config.model_type == "gemma3_text",
    }
