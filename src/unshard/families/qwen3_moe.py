"""Qwen 3 with experts: the attention of Qwen 3, the experts of Qwen 2 without the shared one."""

from unshard.families import qwen2_moe, qwen3
from unshard.families.blocks import NORMS, decoder
from unshard.families.megatron import blocks as megatron
from unshard.families.template import Block, Family, PackedExperts, SparseLayer
from unshard.families.torchtitan import blocks as torchtitan
from unshard.families.transformers5 import QWEN_MOE

_ROUTER_FIRST = Block("", qwen2_moe.ROUTER, when=PackedExperts(False))
_ROUTER_LAST = Block("", qwen2_moe.ROUTER, when=PackedExperts())

FAMILY = Family(
    model_type="qwen3_moe",
    prefix="Qwen3Moe",
    parameters=decoder(
        *qwen3.ATTENTION,
        qwen2_moe.DENSE,
        Block("mlp", (_ROUTER_FIRST, qwen2_moe.SINGLE, qwen2_moe.PACKED, _ROUTER_LAST), when=SparseLayer()),
        *NORMS,
    ),
    rules=QWEN_MOE,
    defaults=qwen2_moe.DEFAULTS,
    megatron=megatron.GROUPED_MOE,
    torchtitan=torchtitan.QWEN_MOE,
)
