"""Gemma 2: as Gemma, with norms behind attention and MLP too."""

from unshard.families import gemma
from unshard.families.blocks import NORMS, decoder, gated_mlp
from unshard.families.megatron import blocks as megatron
from unshard.families.megatron.blocks import HUB_LAYER, LAYER, Rules, norm
from unshard.families.template import Block, Family, parameter

MLP_AND_NORMS = (
    Block("mlp", gated_mlp()),
    *NORMS,
    parameter("pre_feedforward_layernorm.weight", "hidden_size"),
    parameter("post_feedforward_layernorm.weight", "hidden_size"),
)


def megatron_layer(at: str = LAYER, to: str = HUB_LAYER) -> Rules:
    """A layer of Gemma 2 or 3 (NVIDIA-NeMo/Megatron-Bridge, `gemma2_bridge.py` and `gemma3_bridge.py`)."""
    return (
        *megatron.attention(at, to, zero_centred=True),
        *norm(f"{at}.self_attention.linear_proj.post_layernorm", f"{to}.post_attention_layernorm", zero_centred=True),
        *norm(f"{at}.pre_mlp_layernorm", f"{to}.pre_feedforward_layernorm", zero_centred=True),
        *megatron.gated_mlp(f"{at}.mlp", f"{to}.mlp"),
        *norm(f"{at}.mlp.linear_fc2.post_layernorm", f"{to}.post_feedforward_layernorm", zero_centred=True),
    )


FAMILY = Family(
    model_type="gemma2",
    prefix="Gemma2",
    parameters=decoder(*gemma.ATTENTION, *MLP_AND_NORMS),
    defaults=gemma.DEFAULTS,
    megatron=(*megatron.embeddings(zero_centred=True), *megatron_layer()),
)
