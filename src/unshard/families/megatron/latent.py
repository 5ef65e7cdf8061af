"""The keys of DeepSeek V2 and V3 in a derived config.json: multi-head latent attention, experts of groups."""

from __future__ import annotations

from typing import Any

from unshard.families.megatron.deriving import Draft

_AT = "self_attention."
_FC2, _EXPERT_FC2 = "mlp.linear_fc2.weight", "mlp.experts.linear_fc2.weight"
_SHARED_FC2 = "mlp.shared_experts.linear_fc2.weight"


def add_latent_attention(draft: Draft) -> None:
    """All that a DeepSeek model has beside what all families have."""
    _add_heads(draft)
    _add_experts(draft)
    _add_rotary(draft)
    draft.config["num_key_value_heads"] = draft.config["num_attention_heads"]
    draft.config["attention_bias"] = False


def _add_heads(draft: Draft) -> None:
    """The ranks and the sizes of heads, told by the projections' shapes (megatron-core `multi_latent_attention.py`)."""
    heads, shapes = draft.config["num_attention_heads"], draft.shapes
    latent = shapes.size(_AT + "kv_layernorm.weight", 0)
    down, up = shapes.size(_AT + "linear_kv_down_proj.weight", 0), shapes.size(_AT + "linear_kv_up_proj.weight", 0)
    out = shapes.size(_AT + "linear_proj.weight", 1)
    if not heads:
        return
    if latent is None or down is None or up is None or out is None or out % heads or up % heads:
        draft.missing.append(f"shapes of latent attention that fit {heads} heads")
        return
    draft.config |= {
        "kv_lora_rank": latent,
        "q_lora_rank": shapes.size(_AT + "linear_q_down_proj.weight", 0),
        "qk_rope_head_dim": down - latent,
        "qk_nope_head_dim": up // heads - out // heads,
        "v_head_dim": out // heads,
    }


def _add_experts(draft: Draft) -> None:
    experts = draft.shapes.shape(_EXPERT_FC2)
    layers = draft.shapes.layers
    dense = draft.shapes.layers_of(_FC2)
    if dense != list(range(len(dense))):
        draft.missing.append("a family with dense layers behind layers with experts")
    draft.config |= {"first_k_dense_replace": len(dense), "moe_layer_freq": 1}
    draft.config["intermediate_size"] = draft.shapes.size(_FC2, 1) or draft.integer("ffn_hidden_size")
    if experts is None:
        draft.config["first_k_dense_replace"] = layers
        return
    shared = draft.shapes.size(_SHARED_FC2, 1) or 0
    is_v3 = draft.config["model_type"] == "deepseek_v3"
    groups, chosen = draft.integer("moe_router_num_groups"), draft.integer("moe_router_group_topk")
    draft.config |= {
        "n_routed_experts": experts[0],
        "n_shared_experts": shared // experts[2],
        "moe_intermediate_size": experts[2],
        "num_experts_per_tok": draft.require("moe_router_topk"),
        "n_group": groups or 1,
        "topk_group": chosen or 1,
        "topk_method": "noaux_tc" if is_v3 else "group_limited_greedy" if groups else "greedy",
        "scoring_func": "sigmoid" if is_v3 else "softmax",
        "norm_topk_prob": is_v3,
        "routed_scaling_factor": float(draft.assume("moe_router_topk_scaling_factor", 1.0)),
        "num_nextn_predict_layers": draft.integer("mtp_num_layers") or 0,
    }
    if shared % experts[2]:
        draft.missing.append("a family whose shared experts are not as wide as a whole number of others")


def _add_rotary(draft: Draft) -> None:
    """The rotary base, and YaRN, which is the default of Megatron's latent attention (`MLATransformerConfig`)."""
    draft.config["rope_theta"] = float(draft.assume("rotary_base", 10000))
    factor = draft.number("rotary_scaling_factor")
    if draft.facts.get("rope_type") == "rope" or factor is None or factor == 1:
        if draft.facts.get("rope_type") is None:
            draft.assumptions.append("how rotary positions are scaled is not recorded: taken not to be scaled")
        return
    scaling: dict[str, Any] = {"type": "yarn", "rope_type": "yarn", "factor": factor}
    named = {
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
    }
    scaling |= {name: draft.assume(name, usual) for name, usual in named.items()}
    draft.config["rope_scaling"] = scaling
