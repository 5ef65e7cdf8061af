"""StarCoder 2: layer norms with biases, biases everywhere, an MLP without gates."""

from unshard.families.blocks import attention, decoder
from unshard.families.megatron import blocks as megatron
from unshard.families.megatron.blocks import HUB_LAYER, LAYER, norm
from unshard.families.template import Block, Family, Flag, layer_norm, linear

_BIAS = Flag("use_bias")

FAMILY = Family(
    model_type="starcoder2",
    prefix="Starcoder2",
    parameters=decoder(
        *attention(bias=_BIAS, output_bias=_BIAS),
        Block(
            "mlp",
            (
                *linear("c_fc", "intermediate_size", "hidden_size", _BIAS),
                *linear("c_proj", "hidden_size", "intermediate_size", _BIAS),
            ),
        ),
        *layer_norm("input_layernorm", "hidden_size"),
        *layer_norm("post_attention_layernorm", "hidden_size"),
        norm=layer_norm("norm", "hidden_size"),
    ),
    defaults={"use_bias": True},
    megatron=(
        *megatron.embeddings(),
        *megatron.attention(),
        *norm(f"{LAYER}.pre_mlp_layernorm", f"{HUB_LAYER}.post_attention_layernorm"),
        *megatron.linear(f"{LAYER}.mlp.linear_fc1", f"{HUB_LAYER}.mlp.c_fc"),
        *megatron.linear(f"{LAYER}.mlp.linear_fc2", f"{HUB_LAYER}.mlp.c_proj"),
    ),
)
