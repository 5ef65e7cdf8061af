"""Llama 1 to 3.3, and what shares their architecture."""

from unshard.families.blocks import NORMS, attention, decoder, gated_mlp
from unshard.families.megatron.blocks import DENSE
from unshard.families.template import Block, Family, Flag
from unshard.families.torchtitan.blocks import LLAMA

FAMILY = Family(
    model_type="llama",
    prefix="Llama",
    parameters=decoder(
        *attention(bias=Flag("attention_bias"), output_bias=Flag("attention_bias")),
        Block("mlp", gated_mlp(bias=Flag("mlp_bias"))),
        *NORMS,
    ),
    megatron=DENSE,
    torchtitan=LLAMA,
)
