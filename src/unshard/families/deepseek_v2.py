"""DeepSeek V2: latent attention; experts, with some that every token takes, behind the first layers."""

from collections.abc import Mapping

from unshard.families.blocks import NORMS, decoder, experts, gated_mlp, latent_attention
from unshard.families.megatron import blocks as megatron
from unshard.families.sizes import Default
from unshard.families.template import Block, Contents, Family, Flag, SparseTail, linear
from unshard.families.transformers5 import PER_EXPERT

_BIAS = Flag("mlp_bias")

EXPERTS: Contents = (
    *experts("n_routed_experts", "moe_intermediate_size"),
    *linear("gate", "n_routed_experts", "hidden_size"),
    Block("shared_experts", gated_mlp("moe_intermediate_size*n_shared_experts", bias=_BIAS)),
)
MLP: Contents = (
    Block("mlp", EXPERTS, when=SparseTail()),
    Block("mlp", gated_mlp(bias=_BIAS), when=SparseTail(False)),
)
LAYER: Contents = (*latent_attention(), *MLP, *NORMS)

DEFAULTS: Mapping[str, Default] = {"q_lora_rank": 1536, "first_k_dense_replace": 0, "moe_layer_freq": 1}

FAMILY = Family(
    model_type="deepseek_v2",
    prefix="DeepseekV2",
    parameters=decoder(*LAYER),
    heads=("ForCausalLM", "ForSequenceClassification"),
    rules=PER_EXPERT,
    defaults=DEFAULTS,
    fp32=(".mlp.gate.weight",),
    megatron=megatron.LATENT_MOE,
)
