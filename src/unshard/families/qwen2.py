"""Qwen 1.5, 2 and 2.5, dense: as Mistral, with biases on queries, keys and values."""

from unshard.families.blocks import NORMS, attention, decoder, gated_mlp
from unshard.families.megatron.blocks import DENSE
from unshard.families.template import Block, Family

LAYER = (*attention(bias=True), Block("mlp", gated_mlp()), *NORMS)

FAMILY = Family(
    model_type="qwen2",
    prefix="Qwen2",
    parameters=decoder(*LAYER),
    megatron=DENSE,
)
