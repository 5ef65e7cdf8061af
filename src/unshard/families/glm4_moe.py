"""GLM 4.5 to 4.7: grouped attention, the experts of DeepSeek V3, and a layer that predicts a further token."""

from unshard.families import deepseek_v2, deepseek_v3
from unshard.families.blocks import HEAD_NORMS, NORMS, attention, decoder
from unshard.families.megatron import blocks as megatron
from unshard.families.template import Block, Family, Flag
from unshard.families.transformers5 import PER_EXPERT

_LAYER = (
    *attention(bias=Flag("attention_bias")),
    Block("", HEAD_NORMS, when=Flag("use_qk_norm")),
    *deepseek_v2.MLP,
    *NORMS,
)

FAMILY = Family(
    model_type="glm4_moe",
    prefix="Glm4Moe",
    parameters=decoder(*_LAYER),
    heads=("ForCausalLM",),
    rules=PER_EXPERT,
    defaults={**deepseek_v3.DEFAULTS, "first_k_dense_replace": 1},
    extras=deepseek_v3.extras(_LAYER),
    fp32=deepseek_v3.FP32,
    megatron=(*megatron.GROUPED_MOE, *megatron.MTP),
    mtp_follows=True,
)
