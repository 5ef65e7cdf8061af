"""Models of transformers in torchtitan's names and layouts, at several of its ages: plain torch, without the rules.

Written from the adapters of torchtitan (`torchtitan/models/*/state_dict_adapter.py`), their way from Hugging Face.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Age:
    """What torchtitan called things at a time.

    head:     the output layer.
    queries:  where projections of attention lie, below the layer; `fused`: they are one matrix.
    experts:  where stacks of experts lie, and with what behind w1 and w3, and behind w2.
    balance:  the bias of routers.
    stacked:  shared experts are a stack of one.
    """

    head: str = "lm_head"
    queries: str = "attention.qkv_linear"
    fused: bool = False
    experts: tuple[str, str, str] = ("moe.routed_experts.inner_experts", "_EFD", "_EDF")
    balance: str = "moe.expert_bias_E"
    stacked: bool = False


OLD = ("moe.experts", "", "")
AGES = {
    "2025-08-12": Age("output", "attention", experts=OLD, balance="moe.expert_bias", stacked=True),
    "v0.2.2": Age("output", "attention", experts=OLD, balance="moe.expert_bias"),
    "2026-05": Age(fused=True, experts=OLD, balance="moe.expert_bias"),
    "2026-06": Age(fused=True, experts=("moe.experts", "_EFD", "_EDF")),
    "2026-08": Age(),
}

_LAYER = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "self_attn.q_a_proj": "attention.wq_a",
    "self_attn.q_a_layernorm": "attention.q_norm",
    "self_attn.q_b_proj": "attention.wq_b",
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a",
    "self_attn.kv_a_layernorm": "attention.kv_norm",
    "self_attn.kv_b_proj": "attention.wkv_b",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.gate": "moe.router.gate",
    "mlp.router": "moe.router.gate",
    "mlp.shared_experts.gate_proj": "moe.shared_experts.w1",
    "mlp.shared_experts.up_proj": "moe.shared_experts.w3",
    "mlp.shared_experts.down_proj": "moe.shared_experts.w2",
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "eh_proj",
    "shared_head.norm": "mtp_norm",
}
_EXPERT = re.compile(r"mlp\.experts\.([0-9]+)\.(\w+)_proj\.weight")
_KINDS = {"gate": "w1", "up": "w3", "down": "w2"}


def to_titan(state: Mapping[str, torch.Tensor], config: Any, age: Age = AGES["2026-08"]) -> State:
    """The tensors that torchtitan stores of a model whose file holds `state`."""
    outer = {"model.embed_tokens.weight": "tok_embeddings.weight", "model.norm.weight": "norm.weight"}
    full = {titan: state[hf].clone() for hf, titan in outer.items()}
    full[f"{age.head}.weight"] = state.get("lm_head.weight", state["model.embed_tokens.weight"]).clone()
    layers: dict[int, State] = {}
    for name, tensor in state.items():
        if match := re.fullmatch(r"model\.layers\.([0-9]+)\.(.+)", name):
            layers.setdefault(int(match[1]), {})[match[2]] = tensor
    for number, layer in layers.items():
        further = number - config.num_hidden_layers
        at = f"layers.{number}" if further < 0 else f"mtp_layers.{further}"
        full |= {f"{at}.{name}": tensor for name, tensor in convert_layer(layer, config, age).items()}
    return full


def convert_layer(layer: State, config: Any, age: Age) -> State:
    full = convert_attention(layer, config, age)
    experts: dict[str, dict[int, torch.Tensor]] = {}
    place, *endings = age.experts
    for name, tensor in layer.items():
        module, _, kind = name.rpartition(".")
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(_KINDS[match[2]], {})[int(match[1])] = tensor
        elif name == "mlp.gate.e_score_correction_bias":
            full[age.balance] = tensor
        elif name == "self_attn.sinks":
            full["attention.sinks"] = tensor
        elif name.startswith("mlp.experts."):
            full |= convert_alternating(name, tensor, place, bool(endings[0]))
        elif age.stacked and module.startswith("mlp.shared_experts."):
            full[_LAYER[module].replace("experts", "expert")] = tensor.unsqueeze(0)
        elif module in _LAYER:
            full[f"{_LAYER[module]}.{kind}"] = tensor
    for kind, ones in experts.items():
        ending = endings[kind == "w2"]
        full[f"{place}.{kind}{ending}"] = torch.stack([ones[number] for number in range(len(ones))])
    return full


def convert_alternating(name: str, tensor: torch.Tensor, place: str, suffixed: bool) -> State:
    """gpt-oss: [experts, in, out] in the file, [experts, out, in] here."""
    titan, suffix = {
        "gate_up_proj": ("mlp1_weight", "_EGD"),
        "gate_up_proj_bias": ("mlp1_bias", "_EG"),
        "down_proj": ("mlp2_weight", "_EDF"),
        "down_proj_bias": ("mlp2_bias", "_ED"),
    }[name.rpartition(".")[2]]
    value = tensor if titan.endswith("bias") else tensor.transpose(1, 2).contiguous()
    return {f"{place}.{titan}{suffix if suffixed else ''}": value}


def convert_attention(layer: State, config: Any, age: Age) -> State:
    """Projections of grouped-query attention, rotary pairs beside each other where torchtitan turns pairs."""
    if "self_attn.kv_a_proj_with_mqa.weight" in layer:
        queries = layer.get("self_attn.q_proj.weight")
        return {} if queries is None else {"attention.wq.weight": queries}
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": None}
    full: State = {}
    for kind in ("weight", "bias"):
        parts = {part: layer[name] for part in heads if (name := f"self_attn.{part}_proj.{kind}") in layer}
        if not parts:
            continue
        if config.model_type in ("llama", "mistral"):
            parts = {part: pairs(tensor, heads[part]) for part, tensor in parts.items()}
        if age.fused:
            full[f"{age.queries}.wqkv.{kind}"] = fuse(parts, config)
        else:
            full |= {f"{age.queries}.w{part}.{kind}": tensor for part, tensor in parts.items()}
    return full


def pairs(tensor: torch.Tensor, heads: int | None) -> torch.Tensor:
    """From halves of heads to pairs of neighbours."""
    return tensor if heads is None else tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def fuse(parts: State, config: Any) -> torch.Tensor:
    """For each key head its queries, the key, the value."""
    width, groups = config.head_dim, config.num_key_value_heads
    grouped = [parts[part].unflatten(0, (groups, -1, width)) for part in "qkv"]
    return torch.cat(grouped, 1).flatten(0, 2).contiguous()
