"""Qwen 3.5: delta nets and gated attention as Qwen 3 Next, dense or with experts, alone or beside a vision tower."""

from __future__ import annotations

from unshard.families import qwen2_moe, qwen3_next, qwen3_vl
from unshard.families.blocks import NORMS, decoder, gated_mlp
from unshard.families.megatron import blocks as megatron
from unshard.families.megatron import vision
from unshard.families.qwen3_next import CHANNELS, VALUES
from unshard.families.rules import Rule
from unshard.families.steps import Sections
from unshard.families.template import Block, Contents, Family, linear
from unshard.families.transformers5 import QWEN_MOE

_DELTA_NET: Contents = (
    *qwen3_next.DELTA_NET_STATE,
    *qwen3_next.DELTA_NET_OUTPUT,
    *linear("linear_attn.in_proj_qkv", CHANNELS, "hidden_size"),
    *linear("linear_attn.in_proj_z", VALUES, "hidden_size"),
    *linear("linear_attn.in_proj_b", "linear_num_value_heads", "hidden_size"),
    *linear("linear_attn.in_proj_a", "linear_num_value_heads", "hidden_size"),
)
_HYBRID = qwen3_next.hybrid(_DELTA_NET)
_DENSE: Contents = (*_HYBRID, Block("mlp", gated_mlp()), *NORMS)
_EXPERTS: Contents = (
    *_HYBRID,
    Block("mlp", (*qwen2_moe.ROUTER, qwen2_moe.PACKED, qwen2_moe.SINGLE, *qwen2_moe.SHARED)),
    *NORMS,
)
_DENSE_MTP = qwen3_next.mtp_extra((Block("mlp", gated_mlp()),))
_EXPERTS_MTP = qwen3_next.mtp_extra((Block("mlp", qwen3_next.EXPERTS_IN_FILE),))


def _projections(at: str, to: str) -> megatron.Rules:
    """`in_proj` is queries, keys and values, then z, beta and alpha: consecutive in the file too."""
    sections = Sections((CHANNELS, VALUES, "linear_num_value_heads", "linear_num_value_heads"))
    parts = tuple([f"{to}.linear_attn.in_proj_{name}.weight" for name in ("qkv", "z", "b", "a")])
    return (Rule(f"{at}.self_attention.in_proj.weight", parts, (sections,)),)


TEXT = Family(
    model_type="qwen3_5_text",
    prefix="Qwen3_5",
    parameters=decoder(*_DENSE),
    heads=("ForCausalLM", "ForTokenClassification", "ForSequenceClassification"),
    defaults=qwen3_next.DEFAULTS,
    extras=(_DENSE_MTP,),
    megatron=qwen3_next.megatron_model(megatron.gated_mlp, _projections),
)
MOE_TEXT = Family(
    model_type="qwen3_5_moe_text",
    prefix="Qwen3_5Moe",
    parameters=decoder(*_EXPERTS),
    heads=("ForCausalLM",),
    rules=QWEN_MOE,
    defaults=qwen3_next.DEFAULTS,
    extras=(_EXPERTS_MTP,),
    megatron=qwen3_next.megatron_model(qwen3_next.feed_forward_of_experts, _projections),
)
VISION = Family(
    model_type="qwen3_5",
    prefix="Qwen3_5",
    parameters=(*qwen3_vl.TOWER, *decoder(*_DENSE, at="model.language_model")),
    heads=("ForConditionalGeneration",),
    defaults={**qwen3_vl.VISION_DEFAULTS, **qwen3_next.DEFAULTS},
    extras=(_DENSE_MTP,),
    megatron=(
        *vision.QWEN3_VL,
        *qwen3_next.megatron_model(megatron.gated_mlp, _projections, "language_model.", "model.language_model"),
    ),
)
MOE_VISION = Family(
    model_type="qwen3_5_moe",
    prefix="Qwen3_5Moe",
    parameters=(*qwen3_vl.TOWER, *decoder(*_EXPERTS, at="model.language_model")),
    heads=("ForConditionalGeneration",),
    rules=QWEN_MOE,
    defaults={**qwen3_vl.VISION_DEFAULTS, **qwen3_next.DEFAULTS},
    extras=(_EXPERTS_MTP,),
    megatron=(
        *vision.QWEN3_VL,
        *qwen3_next.megatron_model(
            qwen3_next.feed_forward_of_experts, _projections, "language_model.", "model.language_model"
        ),
    ),
)

FAMILIES = (TEXT, MOE_TEXT, VISION, MOE_VISION)
