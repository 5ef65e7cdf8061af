"""Gemma: as Llama, with a head size of its own and norms that count from 1."""

from collections.abc import Mapping

from unshard.families.blocks import NORMS, attention, decoder, gated_mlp
from unshard.families.megatron.blocks import dense_layer, embeddings
from unshard.families.sizes import Default
from unshard.families.template import Block, Family, Flag

ATTENTION = attention(bias=Flag("attention_bias"), output_bias=Flag("attention_bias"))

DEFAULTS: Mapping[str, Default] = {"head_dim": 256, "megatron.apply_layernorm_1p": True}
"""Megatron's Gemmas have zero-centred norms as well, unless NeMo 1 recorded otherwise (NeMo, `gpt/model/gemma.py`)."""

FAMILY = Family(
    model_type="gemma",
    prefix="Gemma",
    parameters=decoder(*ATTENTION, Block("mlp", gated_mlp()), *NORMS),
    defaults=DEFAULTS,
    megatron=(*embeddings(zero_centred=True), *dense_layer(zero_centred=True)),
)
