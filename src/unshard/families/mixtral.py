"""Mixtral: as Mistral, with experts in every layer."""

from unshard.families.blocks import NORMS, attention, decoder, packed_experts
from unshard.families.megatron import blocks as megatron
from unshard.families.template import Block, Family, PackedExperts, linear
from unshard.families.transformers5 import MIXTRAL

_ROUTER = linear("gate", "num_local_experts", "hidden_size")

_EXPERT = (
    *linear("w1", "intermediate_size", "hidden_size"),
    *linear("w2", "hidden_size", "intermediate_size"),
    *linear("w3", "intermediate_size", "hidden_size"),
)

_SINGLE = (*_ROUTER, Block("experts.{expert}", _EXPERT, count="num_local_experts"))

FAMILY = Family(
    model_type="mixtral",
    prefix="Mixtral",
    parameters=decoder(
        *attention(),
        Block("mlp", (*_ROUTER, *packed_experts("num_local_experts", "intermediate_size")), when=PackedExperts()),
        Block("block_sparse_moe", _SINGLE, when=PackedExperts(False)),
        *NORMS,
    ),
    rules=MIXTRAL,
    defaults={"num_local_experts": "num_experts"},
    megatron=(
        *megatron.DENSE,
        *megatron.mixture(to=f"{megatron.HUB_LAYER}.block_sparse_moe", names=("w1", "w3", "w2")),
    ),
)
