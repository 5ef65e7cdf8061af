"""What files of DeepSeek's kin hold beside the model in transformers: layers of further tokens, a router's bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from outlines import name, outlines, texts, the_problem
from unshard.families import FAMILIES, expected_file_shapes, expected_shapes
from unshard.tensors import Value

CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "transformers_version": "4.57.0",
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "moe_intermediate_size": 6,
    "n_routed_experts": 3,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 5,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "vocab_size": 20,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}
BIAS = "mlp.gate.e_score_correction_bias"
OWN = {"enorm.weight": (8,), "hnorm.weight": (8,), "eh_proj.weight": (8, 16), "shared_head.norm.weight": (8,)}
COPIES = {"embed_tokens.weight": (20, 8), "shared_head.head.weight": (20, 8)}


def file_of(config: Mapping[str, Any]) -> dict[str, Value]:
    """What transformers would save: parameters and the bias of each layer of experts."""
    biases = {f"model.layers.{layer}.{BIAS}": (3,) for layer in (1, 2)}
    return outlines({**(expected_file_shapes(config) or {}), **biases})


def further_layer() -> dict[str, Value]:
    """Layer 3 as the hub has it, without what it repeats of the model."""
    last = "model.layers.2."
    inner = {key.removeprefix(last): value.shape for key, value in file_of(CONFIG).items() if key.startswith(last)}
    return outlines({f"model.layers.3.{key}": shape for key, shape in {**OWN, **inner}.items()})


def test_a_file_of_the_hub_passes_whole_with_its_layer_of_further_tokens() -> None:
    copies = outlines({f"model.layers.3.{key}": shape for key, shape in COPIES.items()})
    for tensors in (file_of(CONFIG) | further_layer(), file_of(CONFIG) | further_layer() | copies):
        model = name(tensors, CONFIG)
        assert not model.problems
        assert not model.notes
        assert list(model.tensors) == list(tensors)


@pytest.mark.parametrize("missing", ["eh_proj.weight", "mlp.experts.2.up_proj.weight", "input_layernorm.weight"])
def test_a_layer_of_further_tokens_in_part_is_an_error_that_names_what_is_missing(missing: str) -> None:
    tensors = file_of(CONFIG) | further_layer()
    del tensors[f"model.layers.3.{missing}"]
    assert f"model.layers.3.{missing}" in the_problem(name(tensors, CONFIG)).message


def test_layers_of_further_tokens_that_config_counts_and_nobody_has_are_a_warning() -> None:
    model = name(file_of(CONFIG), CONFIG)
    assert not model.problems
    (note,) = model.notes
    assert note.level == "warning"
    assert "num_nextn_predict_layers" in note.text
    assert "model.layers.3.eh_proj.weight" in note.tensors
    assert "model.layers.3.mlp.experts.2.down_proj.weight" in note.tensors


def test_a_config_without_such_layers_says_nothing_of_them_and_knows_none() -> None:
    config = {**CONFIG, "num_nextn_predict_layers": 0}
    assert not name(file_of(config), config).notes
    assert "model.layers.3.eh_proj.weight" in the_problem(name(file_of(config) | further_layer(), config)).message


def test_a_bias_of_the_router_is_there_for_all_layers_or_missed() -> None:
    config = {**CONFIG, "num_nextn_predict_layers": 0}
    tensors = file_of(config)
    del tensors[f"model.layers.1.{BIAS}"]
    assert f"model.layers.1.{BIAS}" in the_problem(name(tensors, config)).message
    del tensors[f"model.layers.2.{BIAS}"]
    model = name(tensors, config)
    assert not model.problems
    assert "e_score_correction_bias" in texts(model)


def test_routers_keep_their_precision() -> None:
    kept = name(file_of(CONFIG), CONFIG).uncast
    routers = {f"model.layers.{layer}.mlp.gate.{part}" for layer in (1, 2) for part in ("weight", BIAS[9:])}
    assert kept == routers


def test_layers_of_experts_follow_their_frequency() -> None:
    shapes = expected_shapes({**CONFIG, "num_hidden_layers": 5, "moe_layer_freq": 2, "first_k_dense_replace": 2})
    assert shapes is not None
    assert [layer for layer in range(5) if f"model.layers.{layer}.mlp.gate.weight" in shapes] == [2, 4]


def test_kimi_is_deepseek_v3_under_its_own_type() -> None:
    kimi = {**CONFIG, "model_type": "kimi_k2"}
    assert expected_shapes(kimi) == expected_shapes(CONFIG)
    assert FAMILIES["kimi_k2"].megatron == FAMILIES["deepseek_v3"].megatron


def test_no_rank_for_queries_is_one_matrix_and_an_absent_rank_is_the_default() -> None:
    direct = expected_shapes({**CONFIG, "q_lora_rank": None})
    assert direct is not None
    assert direct["model.layers.0.self_attn.q_proj.weight"] == (10, 8)
    assert "model.layers.0.self_attn.q_b_proj.weight" not in direct
    absent = expected_shapes({key: value for key, value in CONFIG.items() if key != "q_lora_rank"})
    assert absent is not None
    assert absent["model.layers.0.self_attn.q_b_proj.weight"] == (10, 1536)
