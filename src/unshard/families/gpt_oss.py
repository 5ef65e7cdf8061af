"""gpt-oss: attention with sinks, biases everywhere, experts whose matrices lie as [in, out]."""

from __future__ import annotations

from unshard.families.blocks import NORMS, attention, decoder
from unshard.families.megatron import blocks as megatron
from unshard.families.megatron.blocks import HUB_LAYER, LAYER
from unshard.families.rules import Rule, rename
from unshard.families.steps import Permute, Transpose
from unshard.families.template import Block, Family, Flag, linear, parameter
from unshard.families.torchtitan import blocks as torchtitan

_ALTERNATE = Permute(("2", "?"), (1, 0), axis=1)
"""Gates first, then ups, become gate, up, gate, up."""

_EXPERTS, _HUB_EXPERTS = f"{LAYER}.mlp.experts", f"{HUB_LAYER}.mlp.experts"

_TITAN_EXPERTS = tuple(
    [
        Rule(name, (f"{_HUB_EXPERTS}.{to}",), steps)
        for latest, earlier, to, steps in (
            ("mlp1_weight_EGD", "mlp1_weight", "gate_up_proj", (Transpose(),)),
            ("mlp1_bias_EG", "mlp1_bias", "gate_up_proj_bias", ()),
            ("mlp2_weight_EDF", "mlp2_weight", "down_proj", (Transpose(),)),
            ("mlp2_bias_ED", "mlp2_bias", "down_proj_bias", ()),
        )
        for name in torchtitan.expert_names(latest, earlier)
    ]
)
"""torchtitan's matrices lie as [out, in], their gates and ups alternate as they do in the file
(`models/gpt_oss/moe.py`)."""

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
    torchtitan=(
        *torchtitan.embeddings(),
        *torchtitan.norms(),
        *torchtitan.attention(),
        rename(f"{torchtitan.LAYER}.attention.sinks", f"{HUB_LAYER}.self_attn.sinks"),
        *megatron.linear(f"{torchtitan.LAYER}.moe.router.gate", f"{HUB_LAYER}.mlp.router"),
        *_TITAN_EXPERTS,
    ),
)
