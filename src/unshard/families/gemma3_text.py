"""Gemma 3, the language model alone: as Gemma 2, with norms on queries and keys."""

from collections.abc import Mapping

from unshard.families import gemma, gemma2
from unshard.families.blocks import HEAD_NORMS, decoder
from unshard.families.megatron.blocks import embeddings
from unshard.families.sizes import Default
from unshard.families.template import Family

LAYER = (*gemma.ATTENTION, *HEAD_NORMS, *gemma2.MLP_AND_NORMS)

DEFAULTS: Mapping[str, Default] = {
    **gemma.DEFAULTS,
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""Files of the hub leave out of `text_config` what is as in transformers' `Gemma3TextConfig`."""

FAMILY = Family(
    model_type="gemma3_text",
    prefix="Gemma3",
    parameters=decoder(*LAYER),
    heads=("ForCausalLM",),
    defaults=DEFAULTS,
    megatron=(*embeddings(zero_centred=True), *gemma2.megatron_layer()),
)
