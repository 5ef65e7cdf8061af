"""Qwen 2 VL: a vision tower beside the decoder of Qwen 2."""

from collections.abc import Mapping

from unshard.families import qwen2
from unshard.families.blocks import decoder, qwen_vision
from unshard.families.megatron import blocks as megatron
from unshard.families.megatron import vision
from unshard.families.sizes import Default
from unshard.families.template import Block, Family, layer_norm, linear
from unshard.families.transformers5 import QWEN2_VL

VISION_DEFAULTS: Mapping[str, Default] = {
    "vision.in_channels": 3,
    "vision.temporal_patch_size": 2,
    "vision.patch_size": 14,
    "vision.spatial_merge_size": 2,
}

MEGATRON_DECODER: megatron.Rules = (
    *megatron.embeddings("language_model."),
    *megatron.dense_layer("language_model.decoder.layers.{layer}"),
)

_WIDTH = "vision.embed_dim"

_BLOCK = (
    *layer_norm("norm1", _WIDTH),
    *layer_norm("norm2", _WIDTH),
    *linear("attn.qkv", f"3*{_WIDTH}", _WIDTH, bias=True),
    *linear("attn.proj", _WIDTH, _WIDTH, bias=True),
    *linear("mlp.fc1", f"{_WIDTH}*vision.mlp_ratio", _WIDTH, bias=True),
    *linear("mlp.fc2", _WIDTH, f"{_WIDTH}*vision.mlp_ratio", bias=True),
)

FAMILY = Family(
    model_type="qwen2_vl",
    prefix="Qwen2VL",
    parameters=(
        Block("model.visual", qwen_vision(_WIDTH, _BLOCK, layer_norm("ln_q", _WIDTH), output="vision.hidden_size")),
        *decoder(*qwen2.LAYER, at="model.language_model"),
    ),
    heads=("ForConditionalGeneration",),
    rules=QWEN2_VL,
    defaults={**VISION_DEFAULTS, "vision.mlp_ratio": 4},
    megatron=(*vision.QWEN2_VL, *MEGATRON_DECODER),
)
