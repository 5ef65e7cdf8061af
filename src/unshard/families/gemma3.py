"""Gemma 3 with its SigLIP vision tower.

Megatron's model keeps the tower as transformers has it (NVIDIA-NeMo/Megatron-Bridge, `gemma3_vl_bridge.py` and
`modeling_gemma3_vl.py`).
"""

from unshard.families import gemma2, gemma3_text
from unshard.families.blocks import decoder
from unshard.families.megatron.blocks import HUB_LAYER, LAYER, embeddings, norm
from unshard.families.rules import Rule, rename
from unshard.families.steps import Transpose
from unshard.families.template import Block, Contents, Family, Flag, layer_norm, linear, parameter
from unshard.families.transformers5 import NESTED_LLAVA

_WIDTH = "vision.hidden_size"
_PATCHES = "vision.image_size*vision.image_size//vision.patch_size*vision.patch_size"


def _mlp(width: str = "vision.intermediate_size") -> Block:
    return Block("mlp", (*linear("fc1", width, _WIDTH, bias=True), *linear("fc2", _WIDTH, width, bias=True)))


def _attention(*names: str) -> Contents:
    return tuple([part for name in names for part in linear(f"self_attn.{name}", _WIDTH, _WIDTH, bias=True)])


_LAYER = (
    *layer_norm("layer_norm1", _WIDTH),
    *_attention("k_proj", "v_proj", "q_proj", "out_proj"),
    *layer_norm("layer_norm2", _WIDTH),
    _mlp(),
)

_POOLING = (
    parameter("probe", "1", "1", _WIDTH),
    parameter("attention.in_proj_weight", f"3*{_WIDTH}", _WIDTH),
    parameter("attention.in_proj_bias", f"3*{_WIDTH}"),
    *linear("attention.out_proj", _WIDTH, _WIDTH, bias=True),
    *layer_norm("layernorm", _WIDTH),
    _mlp(),
)

_TOWER = (
    parameter("embeddings.patch_embedding.weight", _WIDTH, "vision.num_channels", *["vision.patch_size"] * 2),
    parameter("embeddings.patch_embedding.bias", _WIDTH),
    parameter("embeddings.position_embedding.weight", _PATCHES, _WIDTH),
    Block("encoder.layers.{block}", _LAYER, count="vision.num_hidden_layers"),
    *layer_norm("post_layernorm", _WIDTH),
    Block("head", _POOLING, when=Flag("vision.vision_use_head")),
)

_PROJECTOR = (
    parameter("mm_input_projection_weight", _WIDTH, "hidden_size"),
    parameter("mm_soft_emb_norm.weight", _WIDTH),
)

FAMILY = Family(
    model_type="gemma3",
    prefix="Gemma3",
    parameters=(
        Block("model.vision_tower", _TOWER),
        Block("model.multi_modal_projector", _PROJECTOR),
        *decoder(*gemma3_text.LAYER, at="model.language_model"),
    ),
    heads=("ForConditionalGeneration",),
    rules=NESTED_LLAVA,
    defaults={
        **gemma3_text.DEFAULTS,
        "vision.hidden_size": 768,
        "vision.intermediate_size": 3072,
        "vision.num_hidden_layers": 12,
        "vision.num_channels": 3,
        "vision.image_size": 224,
        "vision.patch_size": 16,
        "vision.vision_use_head": True,
    },
    megatron=(
        *embeddings("language_model.", "language_model.model", "language_model.lm_head", zero_centred=True),
        *gemma2.megatron_layer(f"language_model.{LAYER}", f"language_model.{HUB_LAYER}"),
        rename("vision_tower.{rest}", "vision_tower.vision_model.{rest}"),
        rename("vision_tower.vision_model.{rest}", "vision_tower.vision_model.{rest}"),
        Rule(
            "multi_modal_projector.proj.weight",
            ("multi_modal_projector.mm_input_projection_weight",),
            (Transpose(),),
        ),
        *norm("multi_modal_projector.mm_soft_embed_norm", "multi_modal_projector.mm_soft_emb_norm", zero_centred=True),
    ),
)
