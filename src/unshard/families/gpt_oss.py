"""gpt-oss: attention with sinks, biases everywhere, experts whose matrices lie as [in, out]."""

from __future__ import annotations

from unshard.families.blocks import NORMS, attention, decoder
from unshard.families.megatron import blocks as megatron
from unshard.families.megatron.blocks import HUB_LAYER, LAYER
from unshard.families.rules import Rule, rename
from unshard.families.steps import Permute, Transpose
from unshard.families.template import Block, Family, Flag, linear, parameter

_ALTERNATE = Permute(("2", "?"), (1, 0), axis=1)
"""Gates first, then ups, become gate, up, gate, up."""

_EXPERTS, _HUB_EXPERTS = f"{LAYER}.mlp.experts", f"{HUB_LAYER}.mlp.experts"

FAMILY = Family(
    model_type="gpt_oss",
    prefix="GptOss",
    parameters=decoder(
        parameter("self_attn.sinks", "num_attention_heads"),
        *attention(bias=Flag("attention_bias"), output_bias=Flag("attention_bias")),
        Block(
            "mlp",
            (
                *linear("router", "num_local_experts", "hidden_size", bias=True),
                parameter("experts.gate_up_proj", "num_local_experts", "hidden_size", "2*intermediate_size"),
                parameter("experts.gate_up_proj_bias", "num_local_experts", "2*intermediate_size"),
                parameter("experts.down_proj", "num_local_experts", "intermediate_size", "hidden_size"),
                parameter("experts.down_proj_bias", "num_local_experts", "hidden_size"),
            ),
        ),
        *NORMS,
    ),
    defaults={"head_dim": 64, "attention_bias": True},
    megatron=(
        *megatron.embeddings(),
        *megatron.attention(),
        rename(f"{LAYER}.self_attention.core_attention.softmax_offset", f"{HUB_LAYER}.self_attn.sinks"),
        *megatron.norm(f"{LAYER}.pre_mlp_layernorm", f"{HUB_LAYER}.post_attention_layernorm"),
        *megatron.linear(f"{LAYER}.mlp.router", f"{HUB_LAYER}.mlp.router"),
        Rule(f"{_EXPERTS}.linear_fc1.weight", (f"{_HUB_EXPERTS}.gate_up_proj",), (_ALTERNATE, Transpose())),
        Rule(f"{_EXPERTS}.linear_fc1.bias", (f"{_HUB_EXPERTS}.gate_up_proj_bias",), (_ALTERNATE,)),
        Rule(f"{_EXPERTS}.linear_fc2.weight", (f"{_HUB_EXPERTS}.down_proj",), (Transpose(),)),
        rename(f"{_EXPERTS}.linear_fc2.bias", f"{_HUB_EXPERTS}.down_proj_bias"),
    ),
)
