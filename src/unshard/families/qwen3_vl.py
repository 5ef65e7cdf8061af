"""Qwen 3 VL: the decoder of Qwen 3, dense or with experts, and a vision tower that also speaks from deeper layers."""

from __future__ import annotations

from collections.abc import Mapping

from unshard.families import qwen2_moe, qwen3
from unshard.families.blocks import NORMS, decoder, gated_mlp
from unshard.families.megatron import blocks as megatron
from unshard.families.megatron import vision
from unshard.families.rules import Rule
from unshard.families.sizes import Default
from unshard.families.steps import Transpose
from unshard.families.template import (
    Block,
    Contents,
    Family,
    PackedExperts,
    SparseLayer,
    layer_norm,
    linear,
    parameter,
)
from unshard.families.transformers5 import TRANSPOSED_EXPERTS

VISION_DEFAULTS: Mapping[str, Default] = {
    "vision.in_channels": 3,
    "vision.temporal_patch_size": 2,
    "vision.patch_size": 16,
    "vision.spatial_merge_size": 2,
    "vision.num_position_embeddings": 2304,
}

_WIDTH = "vision.hidden_size"
_MERGED = f"{_WIDTH}*vision.spatial_merge_size*vision.spatial_merge_size"
_PATCH = ("vision.in_channels", "vision.temporal_patch_size", "vision.patch_size", "vision.patch_size")

_BLOCK = (
    *layer_norm("norm1", _WIDTH),
    *layer_norm("norm2", _WIDTH),
    *linear("attn.qkv", f"3*{_WIDTH}", _WIDTH, bias=True),
    *linear("attn.proj", _WIDTH, _WIDTH, bias=True),
    *linear("mlp.linear_fc1", "vision.intermediate_size", _WIDTH, bias=True),
    *linear("mlp.linear_fc2", _WIDTH, "vision.intermediate_size", bias=True),
)


def _merger(width: str) -> Contents:
    """Neighbouring patches become one vector of the language model; the norm runs over `width`."""
    return (
        *layer_norm("norm", width),
        *linear("linear_fc1", _MERGED, _MERGED, bias=True),
        *linear("linear_fc2", "vision.out_hidden_size", _MERGED, bias=True),
    )


_PATCHES: Contents = (
    parameter("patch_embed.proj.weight", _WIDTH, *_PATCH),
    parameter("patch_embed.proj.bias", _WIDTH),
    parameter("pos_embed.weight", "vision.num_position_embeddings", _WIDTH),
    Block("blocks.{block}", _BLOCK, count="vision.depth"),
    Block("merger", _merger(_WIDTH)),
)
TOWER: Contents = (Block("model.visual", _PATCHES),)
_DEEP_TOWER: Contents = (
    Block(
        "model.visual",
        (*_PATCHES, Block("deepstack_merger_list.{merger}", _merger(_MERGED), count="vision.deepstack_visual_indexes")),
    ),
)

_LAYER, _HUB_LAYER = "language_model.decoder.layers.{layer}", "model.language_model.layers.{layer}"
_EXPERTS, _HUB_EXPERTS = f"{_LAYER}.mlp.experts", f"{_HUB_LAYER}.mlp.experts"
_MEGATRON: megatron.Rules = (
    *vision.QWEN3_VL,
    *megatron.embeddings("language_model.", "model.language_model"),
    *megatron.dense_layer(_LAYER, _HUB_LAYER),
)

_PACKED = Block("", (qwen2_moe.PACKED, *qwen2_moe.ROUTER), when=PackedExperts())
_AS_IN_FILE = Block(
    "",
    (
        *qwen2_moe.ROUTER,
        parameter("experts.gate_up_proj", "num_experts", "hidden_size", "2*moe_intermediate_size"),
        parameter("experts.down_proj", "num_experts", "moe_intermediate_size", "hidden_size"),
    ),
    when=PackedExperts(False),
)
"""Transformers 4 ran these experts packed too, but transposed (4.57, `Qwen3VLMoeTextSparseMoeBlock`)."""

DENSE = Family(
    model_type="qwen3_vl",
    prefix="Qwen3VL",
    parameters=(
        *_DEEP_TOWER,
        *decoder(*qwen3.ATTENTION, Block("mlp", gated_mlp()), *NORMS, at="model.language_model"),
    ),
    heads=("ForConditionalGeneration",),
    defaults={**VISION_DEFAULTS, "head_dim": 128},
    megatron=_MEGATRON,
)
MOE = Family(
    model_type="qwen3_vl_moe",
    prefix="Qwen3VLMoe",
    parameters=(
        *_DEEP_TOWER,
        *decoder(
            *qwen3.ATTENTION,
            qwen2_moe.DENSE,
            Block("mlp", (_PACKED, _AS_IN_FILE), when=SparseLayer()),
            *NORMS,
            at="model.language_model",
        ),
    ),
    heads=("ForConditionalGeneration",),
    rules=TRANSPOSED_EXPERTS,
    defaults={**VISION_DEFAULTS, **qwen2_moe.DEFAULTS, "head_dim": 128},
    megatron=(
        *_MEGATRON,
        *megatron.linear(f"{_LAYER}.mlp.router", f"{_HUB_LAYER}.mlp.gate"),
        Rule(f"{_EXPERTS}.linear_fc1.weight", (f"{_HUB_EXPERTS}.gate_up_proj",), (Transpose(),)),
        Rule(f"{_EXPERTS}.linear_fc2.weight", (f"{_HUB_EXPERTS}.down_proj",), (Transpose(),)),
    ),
)

FAMILIES = (DENSE, MOE)
