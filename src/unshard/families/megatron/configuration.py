"""A config.json for a Megatron model that has none: from what training recorded, and from the tensors' shapes.

Shapes say how large everything is, the recorded arguments what shapes cannot say: numbers of heads, the rotary base,
how experts are chosen. What neither says is assumed where the family has a usual value, and said; where it has none,
there is no configuration, and what is missing is named. Facts: Megatron-LM megatron/training/arguments.py for the
arguments and their defaults; transformers `configuration_*.py` for the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from unshard.dtypes import BY_TORCH_NAME
from unshard.families.megatron.deriving import Draft
from unshard.families.megatron.latent import add_latent_attention
from unshard.families.megatron.outline import Outline, outline
from unshard.tensors import Value

_FC1, _FC2 = "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"
_EXPERT_FC1, _EXPERT_FC2 = "mlp.experts.linear_fc1.weight", "mlp.experts.linear_fc2.weight"
_SHARED_FC2, _SHARED_GATE = "mlp.shared_experts.linear_fc2.weight", "mlp.shared_experts.gate_weight"
_QKV, _QKV_BIAS = "self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"
_PROJ_BIAS = "self_attention.linear_proj.bias"
_Q_NORM, _K_NORM = "self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"
_KV_DOWN = "self_attention.linear_kv_down_proj.weight"
_ROUTER_BIAS = "mlp.router.expert_bias"
_POST_NORMS = ("self_attention.linear_proj.post_layernorm.weight", "post_self_attn_layernorm.weight")

_BEYOND: tuple[tuple[str, str], ...] = (
    ("self_attention.in_proj.weight", "gated delta nets"),
    ("self_attention.core_attention.softmax_offset", "attention sinks"),
    ("mixer.in_proj.weight", "Mamba layers"),
    ("mlp.router.bias", "a router with a bias"),
    ("input_layernorm.bias", "norms with biases"),
    *[(name, "norms behind attention and MLP") for name in _POST_NORMS],
)
"""Parameters of models whose configuration is never derived, and what they are."""


@dataclass(frozen=True, slots=True)
class Derived:
    """A derived configuration.

    config:      a valid config.json; None where it cannot be derived.
    assumptions: one sentence for each value that nothing tells.
    missing:     what would have to be known, or is of no family whose configuration can be derived.
    """

    config: Mapping[str, Any] | None
    assumptions: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def derive_config(facts: Mapping[str, Any], tensors: Mapping[str, Value]) -> Derived:
    """The configuration of a model with these canonical tensors, as `facts` (Megatron-LM's argument names) tell it."""
    shapes = outline(tensors)
    draft = Draft(facts, shapes)
    model_type = _find_family(draft)
    if model_type is not None:
        name, fill = _FAMILIES[model_type]
        _add_common(draft, model_type, name, [value.dtype.torch_name for value in tensors.values()][:1])
        fill(draft)
    if draft.missing:
        return Derived(None, (), tuple(dict.fromkeys(draft.missing)))
    return Derived(draft.config, tuple(draft.assumptions))


def _find_family(draft: Draft) -> str | None:
    """The model type, told by which parameters exist; None, and what is beyond us, where there is no such family."""
    shapes = draft.shapes
    if not shapes.layers or "embedding.word_embeddings.weight" not in shapes.outside:
        draft.missing.append("the embedding and the layers of a language model")
        return None
    beyond = [what for name, what in _BEYOND if shapes.has(name)]
    if any(0 in shape for shape in shapes.all_shapes()):
        beyond.append("parameters without elements")
    if any(name.startswith(("vision_model.", "visual.", "vision_tower.")) for name in shapes.outside):
        beyond.append("a vision tower")
    if "decoder.final_layernorm.bias" in shapes.outside:
        beyond.append("norms with biases")
    if draft.facts.get("attention_output_gate"):
        beyond.append("gated attention")
    if draft.facts.get("position_embedding_type", "rope") not in ("rope", "yarn"):
        beyond.append(f"position embeddings of the type {draft.facts['position_embedding_type']}")
    if draft.facts.get("rotary_percent", 1) != 1:
        beyond.append("rotary embeddings of a part of each head")
    if not _is_gated(shapes):
        beyond.append("an MLP without gates")
    elif draft.facts.get("swiglu") is False or "gelu" in str(draft.facts.get("activation_func")):
        beyond.append("gates of another function than SiLU")
    if beyond:
        draft.missing += [f"a family with {what}" for what in dict.fromkeys(beyond)]
        return None
    return _sparse_family(draft) if shapes.has("mlp.router.weight") else _dense_family(draft)


def _is_gated(shapes: Outline) -> bool:
    """Whether the first matrix of the MLPs has gates and ups."""
    pairs = ((_FC1, 0, _FC2, 1), (_EXPERT_FC1, 1, _EXPERT_FC2, 2))
    sizes = [(shapes.size(first, a), shapes.size(second, b)) for first, a, second, b in pairs if shapes.has(first)]
    return bool(sizes) and all(
        rows is not None and columns is not None and rows == 2 * columns for rows, columns in sizes
    )


def _dense_family(draft: Draft) -> str | None:
    if draft.shapes.has(_KV_DOWN):
        return "deepseek_v3"
    if draft.shapes.has(_Q_NORM):
        return "qwen3"
    if draft.shapes.has(_QKV_BIAS) and not draft.shapes.has(_PROJ_BIAS):
        return "qwen2"
    return "mistral" if draft.window() is not None else "llama"


def _sparse_family(draft: Draft) -> str | None:
    shapes = draft.shapes
    if shapes.has(_KV_DOWN):
        scored = shapes.has(_ROUTER_BIAS) or draft.facts.get("moe_router_score_function") == "sigmoid"
        return "deepseek_v3" if scored else "deepseek_v2"
    kinds = {
        (False, False, False): "mixtral",
        (True, False, False): "qwen3_moe",
        (False, True, True): "qwen2_moe",
    }
    found = kinds.get((shapes.has(_Q_NORM), shapes.has(_QKV_BIAS), shapes.has(_SHARED_GATE)))
    if found is None or shapes.has(_ROUTER_BIAS) or (shapes.has(_SHARED_FC2) and found != "qwen2_moe"):
        draft.missing.append("a family with this combination of head norms, biases, shared experts and router")
        return None
    return found


def _add_common(draft: Draft, model_type: str, name: str, dtypes: list[str]) -> None:
    """What all families have."""
    shapes, facts = draft.shapes, draft.facts
    rows, hidden = shapes.outside["embedding.word_embeddings.weight"][:2]
    head = shapes.outside.get("output_layer.weight")
    draft.config |= {"architectures": [f"{name}ForCausalLM"], "model_type": model_type}
    if head is not None and head[0] != rows:
        draft.config |= {"architectures": [f"{name}ForTokenClassification"], "num_labels": head[0]}
        draft.assumptions.append(f"the output layer of {head[0]} rows is the head of a value model")
    draft.config |= {
        "vocab_size": _vocabulary(draft, rows),
        "hidden_size": hidden,
        "num_hidden_layers": shapes.layers,
        "num_attention_heads": draft.require("num_attention_heads"),
        "hidden_act": "silu",
        "rms_norm_eps": draft.assume("norm_epsilon", 1e-5),
        "max_position_embeddings": _positions(draft),
        "tie_word_embeddings": _is_tied(draft, head is not None),
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": _dtype(facts.get("params_dtype"), dtypes),
    }
    draft.assumptions.append("bos_token_id and eos_token_id are not recorded: generation ends as the tokenizer says")
    if facts.get("swiglu") is None and facts.get("activation_func") is None:
        draft.assumptions.append("the activation function is not recorded: taken to be SiLU")
    if facts.get("normalization", "RMSNorm") != "RMSNorm":
        draft.missing.append(f"a family with {facts['normalization']}")


def _dtype(recorded: Any, stored: list[str]) -> str | None:
    """The dtype that was recorded, if it is one, else the first tensor's."""
    return recorded if isinstance(recorded, str) and recorded in BY_TORCH_NAME else next(iter(stored), None)


def _vocabulary(draft: Draft, rows: int) -> int:
    size = draft.facts.get("vocab_size")
    if type(size) is int and 0 < size <= rows:
        return size
    draft.assumptions.append(f"vocab_size is not recorded: {rows} rows of the embedding are kept, padding among them")
    return rows


def _positions(draft: Draft) -> int:
    for name in ("max_position_embeddings", "seq_length"):
        if type(draft.facts.get(name)) is int:
            return int(draft.facts[name])
    draft.assumptions.append("max_position_embeddings is not recorded: taken to be 32768")
    return 32768


def _is_tied(draft: Draft, has_head: bool) -> bool:
    """Whether the head is the embedding: last pipeline stages hold a copy of a tied one, so that training says it."""
    untied = draft.facts.get("untie_embeddings_and_output_weights")
    if isinstance(untied, bool):
        return not untied
    if has_head:
        draft.assumptions.append("whether the output layer is tied is not recorded: taken for weights of its own")
    return not has_head


def _add_attention(draft: Draft) -> None:
    """Grouped-query attention: heads of one size, fewer of them for keys and values."""
    heads, hidden = draft.config["num_attention_heads"], draft.config["hidden_size"]
    rows = draft.shapes.size(_QKV, 0)
    if not heads or rows is None:
        return
    size = draft.shapes.size(_Q_NORM, 0) or draft.integer("kv_channels") or hidden // heads
    groups, rest = divmod(rows - heads * size, 2 * size) if size else (0, 0)
    if rest or groups < 1 or heads % groups:
        draft.missing.append(f"head sizes that fit linear_qkv of {rows} rows ({heads} heads of {size} were recorded)")
        return
    recorded = draft.integer("num_query_groups")
    if recorded is not None and recorded != groups:
        draft.missing.append(f"num_query_groups that fit linear_qkv: {recorded} is recorded, {groups} are stored")
    draft.config |= {"num_key_value_heads": groups, "head_dim": size}
    draft.add_rotary()


def _add_mlp(draft: Draft) -> None:
    size = draft.shapes.size(_FC2, 1)
    draft.config["intermediate_size"] = size if size is not None else draft.assume("ffn_hidden_size", 0)


def _add_experts(draft: Draft) -> None:
    """The experts of the Qwen families."""
    experts = draft.shapes.shape(_EXPERT_FC2) or (0, 0, 0)
    dense = draft.shapes.layers_of(_FC2)
    size = draft.shapes.size(_FC2, 1)
    draft.config |= {
        "intermediate_size": size or draft.integer("ffn_hidden_size") or experts[2],
        "num_experts": experts[0],
        "moe_intermediate_size": experts[2],
        "num_experts_per_tok": draft.require("moe_router_topk"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        "norm_topk_prob": not draft.assume("moe_router_pre_softmax", False),
    }


def _check_head_size(draft: Draft) -> None:
    """Qwen 2 has no `head_dim`: its heads share the hidden size."""
    size = draft.config.get("head_dim")
    if size is not None and size * draft.config["num_attention_heads"] != draft.config["hidden_size"]:
        draft.missing.append("a family with biased queries whose heads are not as large as hidden_size / heads")


def _llama(draft: Draft) -> None:
    _add_attention(draft)
    _add_mlp(draft)
    draft.config |= {
        "attention_bias": draft.shapes.has(_PROJ_BIAS, _QKV_BIAS),
        "mlp_bias": draft.shapes.has("mlp.linear_fc1.bias"),
    }
    if draft.shapes.has(_PROJ_BIAS) != draft.shapes.has(_QKV_BIAS):
        draft.missing.append("a family with biases in only a part of attention")
    draft.assumptions.append("the architecture is Llama's; Mistral and others that share it are not told apart")


def _mistral(draft: Draft) -> None:
    _add_attention(draft)
    _add_mlp(draft)
    draft.config["sliding_window"] = draft.window()


def _qwen2(draft: Draft) -> None:
    _add_attention(draft)
    _add_mlp(draft)
    _check_head_size(draft)


def _qwen3(draft: Draft) -> None:
    _add_attention(draft)
    _add_mlp(draft)
    draft.config["attention_bias"] = draft.shapes.has(_QKV_BIAS)


def _mixtral(draft: Draft) -> None:
    _add_attention(draft)
    experts = draft.shapes.shape(_EXPERT_FC2) or (0, 0, 0)
    if draft.shapes.has(_FC2):
        draft.missing.append("a family with experts in only some of its layers")
    if draft.facts.get("moe_router_pre_softmax"):
        draft.missing.append("a family that weighs experts before it chooses them (moe_router_pre_softmax)")
    draft.config |= {
        "intermediate_size": experts[2],
        "num_local_experts": experts[0],
        "num_experts_per_tok": draft.require("moe_router_topk"),
    }


def _qwen2_moe(draft: Draft) -> None:
    _add_attention(draft)
    _add_experts(draft)
    _check_head_size(draft)
    draft.config["shared_expert_intermediate_size"] = draft.shapes.size(_SHARED_FC2, 1)


def _qwen3_moe(draft: Draft) -> None:
    _add_attention(draft)
    _add_experts(draft)
    draft.config["attention_bias"] = draft.shapes.has(_QKV_BIAS)


_FAMILIES: Mapping[str, tuple[str, Callable[[Draft], None]]] = {
    "llama": ("Llama", _llama),
    "mistral": ("Mistral", _mistral),
    "qwen2": ("Qwen2", _qwen2),
    "qwen3": ("Qwen3", _qwen3),
    "mixtral": ("Mixtral", _mixtral),
    "qwen2_moe": ("Qwen2Moe", _qwen2_moe),
    "qwen3_moe": ("Qwen3Moe", _qwen3_moe),
    "deepseek_v2": ("DeepseekV2", add_latent_attention),
    "deepseek_v3": ("DeepseekV3", add_latent_attention),
}
"""Model type → beginning of the class names in transformers, and what adds the keys of its own."""
