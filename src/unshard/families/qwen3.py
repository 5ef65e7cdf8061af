"""Qwen 3, dense: norms on queries and keys, and a head size of its own."""

from unshard.families.blocks import HEAD_NORMS, NORMS, attention, decoder, gated_mlp
from unshard.families.megatron.blocks import DENSE
from unshard.families.template import Block, Family, Flag
from unshard.families.torchtitan.blocks import QWEN

ATTENTION = (*attention(bias=Flag("attention_bias"), output_bias=Flag("attention_bias")), *HEAD_NORMS)

FAMILY = Family(
    model_type="qwen3",
    prefix="Qwen3",
    parameters=decoder(*ATTENTION, Block("mlp", gated_mlp()), *NORMS),
    defaults={"head_dim": 128},
    megatron=DENSE,
    torchtitan=QWEN,
)
