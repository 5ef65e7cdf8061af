"""Qwen's vision-language models: Megatron's text model below `language_model.`, a vision tower beside it.

Two ways are in use: Megatron-Bridge keeps the tower of Qwen 2.5 VL as it runs in transformers (`keep_tower`), mbridge
and Megatron-Bridge's Qwen 3 VL rebuild it of Megatron's layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.from_hf.llama import State

TextToMegatron = Callable[[State, Any], State]


def text_to_megatron(state: State, config: Any, to_megatron: TextToMegatron) -> State:
    """The language model, its prefix taken off before and put on after."""
    prefix = "model.language_model." if "model.language_model.norm.weight" in state else "model."
    text = {f"model.{name.removeprefix(prefix)}": value for name, value in state.items() if name.startswith(prefix)}
    text |= {name: value for name, value in state.items() if name.startswith("lm_head.")}
    return {f"language_model.{name}": value for name, value in to_megatron(text, config.text_config).items()}


def keep_tower(state: State) -> State:
    """The tower under its own names."""
    return {name.removeprefix("model."): value for name, value in state.items() if "visual." in name}


def rebuild_tower(state: State, config: Any) -> State:
    """The tower as layers of Megatron: queries, keys and values of one head together."""
    heads = config.vision_config.num_heads
    tower = keep_tower(state)
    full: State = {}
    for name, value in tower.items():
        stem, _, kind = name.rpartition(".")
        parts = stem.split(".")
        if parts[1] == "blocks":
            full |= _block(parts[2], ".".join(parts[3:]), kind, value, tower, heads)
        elif parts[1] == "merger" and parts[2] in ("ln_q", "mlp"):
            full[f"vision_model.{_QWEN2_MERGER['.'.join(parts[2:])]}.{kind}"] = value
        elif parts[1] in ("merger", "deepstack_merger_list"):
            parts[-1] = "patch_norm" if parts[-1] == "norm" else parts[-1]
            where = "decoder." if parts[1] == "deepstack_merger_list" else ""
            full[f"vision_model.{where}{'.'.join(parts[1:])}.{kind}"] = value
        else:
            full[f"vision_model.{'.'.join(parts[1:])}.{kind}"] = value
    return full


_QWEN2_MERGER = {
    "ln_q": "decoder.final_layernorm",
    "mlp.0": "projection.encoder.linear_fc1",
    "mlp.2": "projection.encoder.linear_fc2",
}
_BLOCK = {
    "norm1": "self_attention.linear_qkv.layer_norm_{}",
    "norm2": "mlp.linear_fc1.layer_norm_{}",
    "attn.proj": "self_attention.linear_proj.{}",
    "mlp.fc1": "mlp.linear_fc1.{}",
    "mlp.fc2": "mlp.linear_fc2.{}",
    "mlp.linear_fc1": "mlp.linear_fc1.{}",
    "mlp.linear_fc2": "mlp.linear_fc2.{}",
    "mlp.down_proj": "mlp.linear_fc2.{}",
}


def _block(number: str, name: str, kind: str, value: torch.Tensor, tower: State, heads: int) -> State:
    at = f"vision_model.decoder.layers.{number}."
    if name == "attn.qkv":
        by_kind = value.unflatten(0, (3, heads, -1))
        return {f"{at}self_attention.linear_qkv.{kind}": by_kind.transpose(0, 1).flatten(0, 2).contiguous()}
    if name == "mlp.gate_proj":
        up = tower[f"visual.blocks.{number}.mlp.up_proj.{kind}"]
        return {f"{at}mlp.linear_fc1.{kind}": torch.cat([value, up])}
    return {} if name == "mlp.up_proj" else {at + _BLOCK[name].format(kind): value}
