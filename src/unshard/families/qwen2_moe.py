"""Qwen 1.5 and 2 with experts: a shared expert behind a gate of its own, dense layers here and there."""

from collections.abc import Mapping

from unshard.families.blocks import NORMS, attention, decoder, experts, gated_mlp
from unshard.families.megatron import blocks as megatron
from unshard.families.rules import rename
from unshard.families.sizes import Default
from unshard.families.template import Block, Family, Flag, SparseLayer, linear
from unshard.families.transformers5 import QWEN_MOE

ROUTER = linear("gate", "num_experts", "hidden_size")
PACKED, SINGLE = experts("num_experts", "moe_intermediate_size")
DENSE = Block("mlp", gated_mlp(), when=SparseLayer(False))

DEFAULTS: Mapping[str, Default] = {"num_experts": "num_local_experts", "decoder_sparse_step": 1}

SHARED = (
    Block("shared_expert", gated_mlp("shared_expert_intermediate_size")),
    *linear("shared_expert_gate", "1", "hidden_size"),
)


def shared_expert(at: str, to: str) -> megatron.Rules:
    """The shared expert and its gate, of Megatron's MLP `at` and the file's `to`."""
    return (
        *megatron.gated_mlp(f"{at}.shared_experts", f"{to}.shared_expert"),
        rename(f"{at}.shared_experts.gate_weight", f"{to}.shared_expert_gate.weight"),
    )


FAMILY = Family(
    model_type="qwen2_moe",
    prefix="Qwen2Moe",
    parameters=decoder(
        *attention(bias=Flag("qkv_bias")),
        DENSE,
        Block("mlp", (*ROUTER, PACKED, SINGLE, *SHARED), when=SparseLayer()),
        *NORMS,
    ),
    rules=QWEN_MOE,
    defaults={**DEFAULTS, "qkv_bias": True},
    megatron=(
        *megatron.DENSE,
        *megatron.mixture(),
        *shared_expert(f"{megatron.LAYER}.mlp", f"{megatron.HUB_LAYER}.mlp"),
    ),
)
