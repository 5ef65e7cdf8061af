"""GLM 4 of 0414, dense: the MLP of Phi 3, and norms behind attention and MLP too."""

from unshard.families import phi3
from unshard.families.blocks import NORMS, attention, decoder
from unshard.families.megatron import blocks as megatron
from unshard.families.megatron.blocks import HUB_LAYER, LAYER, norm
from unshard.families.template import Family, Flag, parameter

FAMILY = Family(
    model_type="glm4",
    prefix="Glm4",
    parameters=decoder(
        *attention(bias=Flag("attention_bias")),
        phi3.MLP,
        *NORMS,
        parameter("post_self_attn_layernorm.weight", "hidden_size"),
        parameter("post_mlp_layernorm.weight", "hidden_size"),
    ),
    defaults={"head_dim": 128, "attention_bias": True},
    megatron=(
        *megatron.embeddings(),
        *megatron.attention(),
        *norm(f"{LAYER}.post_self_attn_layernorm", f"{HUB_LAYER}.post_self_attn_layernorm"),
        *norm(f"{LAYER}.pre_mlp_layernorm", f"{HUB_LAYER}.post_attention_layernorm"),
        *phi3.MEGATRON_MLP,
        *norm(f"{LAYER}.post_mlp_layernorm", f"{HUB_LAYER}.post_mlp_layernorm"),
    ),
)
