"""OLMoE: norms over all queries and over all keys, experts in every layer."""

from unshard.families.blocks import NORMS, attention, decoder, experts
from unshard.families.megatron import blocks as megatron
from unshard.families.template import Block, Family, Flag, linear, parameter
from unshard.families.transformers5 import PER_EXPERT

_BIAS = Flag("attention_bias")

FAMILY = Family(
    model_type="olmoe",
    prefix="Olmoe",
    parameters=decoder(
        *attention(_BIAS, _BIAS),
        parameter("self_attn.q_norm.weight", "hidden_size"),
        parameter("self_attn.k_norm.weight", "num_key_value_heads*hidden_size//num_attention_heads"),
        Block(
            "mlp",
            (*linear("gate", "num_experts", "hidden_size"), *experts("num_experts", "intermediate_size")),
        ),
        *NORMS,
    ),
    heads=("ForCausalLM",),
    rules=PER_EXPERT,
    megatron=megatron.GROUPED_MOE,
)
