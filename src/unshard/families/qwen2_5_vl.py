"""Qwen 2.5 VL: the vision tower has norms without biases and a gated MLP."""

from unshard.families import qwen2
from unshard.families.blocks import decoder, gated_mlp, qwen_vision
from unshard.families.megatron import vision
from unshard.families.qwen2_vl import MEGATRON_DECODER, VISION_DEFAULTS
from unshard.families.template import Block, Family, linear, parameter
from unshard.families.transformers5 import QWEN2_VL

_WIDTH = "vision.hidden_size"

_BLOCK = (
    parameter("norm1.weight", _WIDTH),
    parameter("norm2.weight", _WIDTH),
    *linear("attn.qkv", f"3*{_WIDTH}", _WIDTH, bias=True),
    *linear("attn.proj", _WIDTH, _WIDTH, bias=True),
    Block("mlp", gated_mlp("vision.intermediate_size", _WIDTH, bias=True)),
)

FAMILY = Family(
    model_type="qwen2_5_vl",
    prefix="Qwen2_5_VL",
    parameters=(
        Block(
            "model.visual",
            qwen_vision(_WIDTH, _BLOCK, (parameter("ln_q.weight", _WIDTH),), output="vision.out_hidden_size"),
        ),
        *decoder(*qwen2.LAYER, at="model.language_model"),
    ),
    heads=("ForConditionalGeneration",),
    rules=QWEN2_VL,
    defaults=VISION_DEFAULTS,
    megatron=(*vision.QWEN2_5_VL, *MEGATRON_DECODER),
)
