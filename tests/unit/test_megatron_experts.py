"""Experts, latent attention and layers of further tokens: a random model through Megatron's files and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from megatron.checking import ToMegatron, merge_and_compare, random_model  # noqa: E402
from megatron.from_hf import deepseek, moe  # noqa: E402

pytestmark = pytest.mark.torch

TEXT = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 40,
    "num_hidden_layers": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
QWEN = {**TEXT, "num_experts": 4, "moe_intermediate_size": 12}
SHARED = {**TEXT, "n_routed_experts": 4, "moe_intermediate_size": 12, "n_shared_experts": 2, "first_k_dense_replace": 1,
          "n_group": 1, "topk_group": 1}  # fmt: skip
LATENT = {**SHARED, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 6,
          "qk_rope_head_dim": 4, "v_head_dim": 10}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any], ToMegatron]] = {
    "mixtral": ("mixtral", {**TEXT, "num_local_experts": 4}, moe.to_megatron),
    "qwen2_moe": ("qwen2_moe", {**QWEN, "shared_expert_intermediate_size": 16}, moe.to_megatron),
    "qwen2_moe_dense": (
        "qwen2_moe",
        {**QWEN, "shared_expert_intermediate_size": 16, "mlp_only_layers": [0, 2]},
        moe.to_megatron,
    ),
    "qwen3_moe": ("qwen3_moe", {**QWEN, "head_dim": 12}, moe.to_megatron),
    "olmoe": ("olmoe", {**TEXT, "num_experts": 4, "num_key_value_heads": 4}, moe.to_megatron),
    "deepseek_v2": ("deepseek_v2", LATENT, deepseek.to_megatron),
    "deepseek_v2_lite": ("deepseek_v2", {**LATENT, "q_lora_rank": None}, deepseek.to_megatron),
    "deepseek_v3": ("deepseek_v3", {**LATENT, "num_nextn_predict_layers": 0}, deepseek.to_megatron),
    "moonlight": (
        "deepseek_v3",
        {**LATENT, "q_lora_rank": None, "num_nextn_predict_layers": 0},
        deepseek.to_megatron,
    ),
    "glm4_moe": ("glm4_moe", {**SHARED, "num_nextn_predict_layers": 0}, deepseek.to_megatron),
    "glm4_moe_355b": (
        "glm4_moe",
        {**SHARED, "num_nextn_predict_layers": 0, "attention_bias": True, "use_qk_norm": True, "head_dim": 12},
        deepseek.to_megatron,
    ),
    "glm4_moe_lite": ("glm4_moe_lite", LATENT, deepseek.to_megatron),
}

LEGACY: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2, "experts": "te_grouped"},
    "tp2_ep2_etp2": {"tp": 2, "ep": 2, "etp": 2, "experts": "sequential"},
    "tp2_pp2_ep2_etp1": {"tp": 2, "pp": 2, "ep": 2, "etp": 1, "experts": "grouped"},
    "pp2_vpp2_ep2_local": {"pp": 2, "vpp": 2, "ep": 2, "te": False},
}


def build(name: str, dtype: Any = torch.float32) -> tuple[Any, ToMegatron]:
    model_type, settings, to_megatron = MODELS[name]
    config = transformers.CONFIG_MAPPING[model_type](**settings)
    return random_model(config, dtype=dtype), to_megatron


CASES = [
    pytest.param(name, layout, id=f"{name}-{layout}")
    for number, name in enumerate(MODELS)
    for place, layout in enumerate(LEGACY)
    if name in ("qwen3_moe", "deepseek_v3") or place in (number % 3, 3)
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_directories_of_ranks_become_the_file_of_save_pretrained(name: str, layout: str, tmp_path: Path) -> None:
    model, to_megatron = build(name)
    settings = dict(LEGACY[layout])
    if name == "olmoe":  # its norms over all heads know no tensor parallelism
        settings |= {"tp": 1, "etp": 1}
    args = {"swiglu": True, "num_layers": 4}
    logits = layout != "pp2_vpp2_ep2_local"
    merge_and_compare(model, to_megatron, tmp_path, args=args, padded_vocab_size=48, logits=logits, **settings)


ALIKE = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
"""Models whose layers all have experts: only those can be stacked."""

DISTRIBUTED: dict[str, dict[str, Any]] = {
    "stacked_tp2_pp2": {"tp": 2, "pp": 2, "homogeneous": True},
    "layers_tp2_etp1": {"tp": 2, "etp": 1, "homogeneous": False},
    "singleton_pp2": {"pp": 2, "singleton": True, "homogeneous": False},
    "local_layers_tp2": {"tp": 2, "te": False, "homogeneous": False},
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, id=f"{name}-{layout}")
        for number, name in enumerate(MODELS)
        for place, layout in enumerate(DISTRIBUTED)
        if (name in ALIKE if place == 0 else place == 1 or number % 2 == place % 2)
    ],
)
def test_distributed_checkpoints_become_the_file_of_save_pretrained(name: str, layout: str, tmp_path: Path) -> None:
    model, to_megatron = build(name)
    settings = dict(DISTRIBUTED[layout])
    if name == "olmoe":
        settings |= {"tp": 1, "etp": 1}
    merge_and_compare(model, to_megatron, tmp_path, write="torch_dist", args={"swiglu": True}, logits=False, **settings)
