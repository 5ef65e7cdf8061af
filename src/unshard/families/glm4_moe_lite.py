"""GLM 4.7 Flash: DeepSeek V3, with layers of experts by `mlp_layer_types`."""

from dataclasses import replace

from unshard.families import deepseek_v3

FAMILY = replace(
    deepseek_v3.FAMILY,
    model_type="glm4_moe_lite",
    prefix="Glm4MoeLite",
    heads=("ForCausalLM",),
    defaults={**deepseek_v3.DEFAULTS, "q_lora_rank": 768, "first_k_dense_replace": 1},
    torchtitan=(),
)
