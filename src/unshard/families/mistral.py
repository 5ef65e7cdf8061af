"""Mistral 7B and its dense successors."""

from unshard.families.blocks import NORMS, attention, decoder, gated_mlp
from unshard.families.megatron.blocks import DENSE
from unshard.families.template import Block, Family
from unshard.families.torchtitan.blocks import LLAMA

FAMILY = Family(
    model_type="mistral",
    prefix="Mistral",
    parameters=decoder(*attention(), Block("mlp", gated_mlp()), *NORMS),
    megatron=DENSE,
    torchtitan=LLAMA,
)
