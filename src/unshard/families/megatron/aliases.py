"""Names that Megatron has twice: the tables of families know one of them.

TransformerEngine's layers fuse a norm into the linear layer behind it, the local layers keep it apart
(NVIDIA/Megatron-LM, `core/models/gpt/gpt_layer_specs.py`). The names of the local layers are taken, the ones that say
what the parameter is.
"""

from __future__ import annotations

import re

_FUSED_NORMS = (
    (".self_attention.linear_qkv.layer_norm_", ".input_layernorm."),
    (".self_attention.in_proj.layer_norm_", ".input_layernorm."),
    (".self_attention.linear_q_proj.layer_norm_", ".input_layernorm."),
    (".self_attention.linear_q_down_proj.layer_norm_", ".input_layernorm."),
    (".self_attention.linear_kv_down_proj.layer_norm_", ".input_layernorm."),
    (".self_attention.linear_qkv_down_proj.layer_norm_", ".input_layernorm."),
    (".self_attention.linear_q_up_proj.layer_norm_", ".self_attention.q_layernorm."),
    (".self_attention.linear_kv_up_proj.layer_norm_", ".self_attention.kv_layernorm."),
    (".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm."),
)
_MTP = re.compile(
    r"(?P<stem>(?:.+\.)?)mtp\.layers\.(?P<number>[0-9]{1,9})\.(?P<inner>transformer_layer\.)?(?P<rest>.+)"
)


def resolve_alias(name: str, layers_before_mtp: int | None = None) -> str:
    """The name that the tables of families know.

    layers_before_mtp: for models whose files count MTP layers among the decoder's, how many come before: MTP layer i
    is decoder layer `layers_before_mtp + i` then (NVIDIA/Megatron-LM, `core/transformer/multi_token_prediction.py`,
    for the names of its parts).
    """
    for fused, plain in _FUSED_NORMS:
        if fused in name:
            name = name.replace(fused, plain)
            break
    name = name.replace(".mtp_model_layer.", ".transformer_layer.")
    match = _MTP.fullmatch(name)
    if match is None or layers_before_mtp is None:
        return name
    return f"{match['stem']}decoder.layers.{layers_before_mtp + int(match['number'])}.{match['rest']}"
