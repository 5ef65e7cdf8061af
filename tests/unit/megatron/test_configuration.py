"""A config.json from what training recorded: transformers builds the same model from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from unshard.dtypes import BF16
from unshard.families.megatron.configuration import derive_config
from unshard.formats.megatron.experts import stack_experts
from unshard.tensors import Tensor

HEADS, GROUPS, HIDDEN, WIDTH, ROWS = 4, 2, 32, 48, 96
RECORDED = {
    "num_attention_heads": HEADS,
    "num_query_groups": GROUPS,
    "norm_epsilon": 1e-6,
    "rotary_base": 10000,
    "swiglu": True,
    "vocab_size": 90,
    "max_position_embeddings": 64,
    "untie_embeddings_and_output_weights": True,
    "params_dtype": "bfloat16",
    "use_rope_scaling": False,
}


def catalog(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {name: Tensor(name, BF16, shape, ()) for name, shape in shapes.items()}


def dense(**changes: tuple[int, ...] | None) -> dict[str, Tensor]:
    """A model of two layers in Llama's shape; changes: parameters of the layers (`__` for dots), None to leave out."""
    layer: dict[str, tuple[int, ...] | None] = {
        "self_attention.linear_qkv.layer_norm_weight": (HIDDEN,),
        "self_attention.linear_qkv.weight": ((HEADS + 2 * GROUPS) * HIDDEN // HEADS, HIDDEN),
        "self_attention.linear_proj.weight": (HIDDEN, HIDDEN),
        "mlp.linear_fc1.layer_norm_weight": (HIDDEN,),
        "mlp.linear_fc1.weight": (2 * WIDTH, HIDDEN),
        "mlp.linear_fc2.weight": (HIDDEN, WIDTH),
    }
    layer |= {name.replace("__", "."): shape for name, shape in changes.items()}
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (ROWS, HIDDEN)}
    for number in range(2):
        shapes |= {f"decoder.layers.{number}.{name}": shape for name, shape in layer.items() if shape is not None}
    return catalog(shapes | {"decoder.final_layernorm.weight": (HIDDEN,), "output_layer.weight": (ROWS, HIDDEN)})


class TestWhatIsTold:
    def test_everything_recorded(self) -> None:
        derived = derive_config(RECORDED, dense())
        assert derived.config == {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 90,
            "hidden_size": HIDDEN,
            "num_hidden_layers": 2,
            "num_attention_heads": HEADS,
            "num_key_value_heads": GROUPS,
            "head_dim": 8,
            "hidden_act": "silu",
            "intermediate_size": WIDTH,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_position_embeddings": 64,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "torch_dtype": "bfloat16",
            "attention_bias": False,
            "mlp_bias": False,
        }
        assert len(derived.assumptions) == 2
        assert "eos_token_id" in derived.assumptions[0]
        assert "Mistral" in derived.assumptions[1]
        json.dumps(derived.config)

    def test_only_the_heads_recorded(self) -> None:
        """All that nothing tells is said, one sentence each."""
        derived = derive_config({"num_attention_heads": HEADS}, dense())
        assert derived.config is not None
        said = " ".join(derived.assumptions)
        for name in ("vocab_size", "norm_epsilon", "rotary_base", "max_position_embeddings", "tied", "SiLU", "scaled"):
            assert name in said
        assert derived.config["vocab_size"] == ROWS
        assert derived.config["num_key_value_heads"] == GROUPS

    def test_without_heads_there_is_none(self) -> None:
        derived = derive_config({}, dense())
        assert derived.config is None
        assert derived.missing == ("num_attention_heads",)

    def test_a_tied_copy_of_the_last_stage(self) -> None:
        facts = RECORDED | {"untie_embeddings_and_output_weights": False}
        derived = derive_config(facts, dense())
        assert derived.config is not None
        assert derived.config["tie_word_embeddings"] is True

    def test_a_value_head(self) -> None:
        tensors = dense() | catalog({"output_layer.weight": (1, HIDDEN)})
        config = derive_config(RECORDED, tensors).config
        assert config is not None
        assert (config["architectures"], config["num_labels"]) == (["LlamaForTokenClassification"], 1)

    def test_rotary_scaling(self) -> None:
        facts = RECORDED | {"use_rope_scaling": True, "rope_scaling_factor": 32.0}
        config = derive_config(facts, dense()).config
        assert config is not None
        assert config["rope_scaling"] == {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }

    @pytest.mark.parametrize(
        ("changes", "facts", "model_type"),
        [
            ({"self_attention__linear_qkv__bias": (64,)}, {}, "qwen2"),
            ({"self_attention__q_layernorm__weight": (8,)}, {}, "qwen3"),
            ({}, {"window_size": [4096, 0]}, "mistral"),
            ({"self_attention__linear_qkv__bias": (64,), "self_attention__linear_proj__bias": (32,)}, {}, "llama"),
        ],
    )
    def test_the_family_is_told_by_the_tensors(
        self, changes: dict[str, Any], facts: dict[str, Any], model_type: str
    ) -> None:
        config = derive_config(RECORDED | facts, dense(**changes)).config
        assert config is not None
        assert config["model_type"] == model_type


class TestBeyond:
    @pytest.mark.parametrize(
        ("changes", "facts", "words"),
        [
            ({"self_attention__in_proj__weight": (8, 8)}, {}, "delta nets"),
            ({"mlp__linear_fc1__weight": (WIDTH, HIDDEN)}, {}, "without gates"),
            ({"input_layernorm__bias": (HIDDEN,)}, {}, "norms with biases"),
            ({"self_attention__linear_proj__post_layernorm__weight": (HIDDEN,)}, {}, "behind attention"),
            ({}, {"position_embedding_type": "learned_absolute"}, "learned_absolute"),
            ({}, {"rotary_percent": 0.5}, "a part of each head"),
            ({}, {"normalization": "LayerNorm"}, "LayerNorm"),
            ({}, {"swiglu": False}, "another function than SiLU"),
            ({}, {"num_query_groups": 4}, "4 is recorded, 2 are stored"),
            ({}, {"num_attention_heads": 5, "kv_channels": 16}, "linear_qkv of 64 rows"),
            ({}, {"num_attention_heads": 1 << 40}, "linear_qkv"),
            ({"mlp__linear_fc2__weight": (HIDDEN, 0), "mlp__linear_fc1__weight": (0, HIDDEN)}, {}, "without elements"),
        ],
    )
    def test_it_is_named(self, changes: dict[str, Any], facts: dict[str, Any], words: str) -> None:
        derived = derive_config(RECORDED | facts, dense(**changes))
        assert derived.config is None
        assert words in " ".join(derived.missing)

    @pytest.mark.parametrize("names", [(), ("embedding.word_embeddings.weight",), ("decoder.layers.0.x",), ("a",)])
    def test_what_is_no_language_model(self, names: tuple[str, ...]) -> None:
        derived = derive_config(RECORDED, catalog(dict.fromkeys(names, (8, 8))))
        assert (derived.config, len(derived.missing)) == (None, 1)


TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
GROUPED = TINY | {"num_key_value_heads": 2}
EXPERTS = GROUPED | {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = TINY | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", GROUPED, {}),
    "llama_biased": ("Llama", GROUPED | {"attention_bias": True, "mlp_bias": True}, {}),
    "llama_tied_heads": ("Llama", GROUPED | {"head_dim": 16, "tie_word_embeddings": True}, {"kv_channels": 16}),
    "llama3": (
        "Llama",
        GROUPED | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                   "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}},
        {"use_rope_scaling": True, "rope_scaling_factor": 8.0},
    ),
    "mistral": ("Mistral", GROUPED | {"sliding_window": 8, "head_dim": 8}, {"window_size": [8, 0]}),
    "qwen2": ("Qwen2", GROUPED, {}),
    "qwen3": ("Qwen3", GROUPED | {"head_dim": 16}, {}),
    "mixtral": ("Mixtral", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}, {"moe_router_topk": 2}),
    "qwen2_moe": (
        "Qwen2Moe",
        EXPERTS | {"shared_expert_intermediate_size": 40, "norm_topk_prob": False},
        {"moe_router_topk": 2, "moe_router_pre_softmax": True},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        EXPERTS | {"head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]},
        {"moe_router_topk": 2, "moe_router_pre_softmax": False},
    ),
    "deepseek_v2": (
        "DeepseekV2",
        LATENT | {"q_lora_rank": None, "routed_scaling_factor": 1.5},
        {"moe_router_topk": 2, "moe_router_topk_scaling_factor": 1.5, "rope_type": "rope"},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        LATENT | {"q_lora_rank": 20, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5,
                  "rope_scaling": YARN},
        {"moe_router_topk": 2, "moe_router_topk_scaling_factor": 2.5, "moe_router_num_groups": 2,
         "moe_router_group_topk": 1, "rope_type": "yarn", "rotary_scaling_factor": 4.0,
         "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
         "mscale_all_dim": 1.0},
    ),
}  # fmt: skip


OTHER_BIASES = {
    "self_attn.o_proj.bias": "self_attention.linear_proj.bias",
    "mlp.gate_proj.bias": "mlp.linear_fc1.bias",
    "mlp.down_proj.bias": "mlp.linear_fc2.bias",
}
"""Of which the script that makes Megatron's tensors has no need: here, they only have to be there."""


@pytest.mark.torch
@pytest.mark.parametrize("case", CASES)
def test_transformers_builds_the_same_model(case: str, tmp_path: Path) -> None:
    """Same parameters of the same shapes, and the same logits with the same weights."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file

    from megatron.checking import random_model
    from megatron.from_hf import deepseek, llama, moe

    name, settings, facts = CASES[case]
    model = random_model(getattr(transformers, f"{name}Config")(**settings, rope_theta=500000.0))
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    script = deepseek if name.startswith("Deepseek") else moe if "Moe" in name or name == "Mixtral" else llama
    full = script.to_megatron(dict(state), model.config) | {
        key.replace("model.layers", "decoder.layers").replace(theirs, ours): value
        for theirs, ours in OTHER_BIASES.items()
        for key, value in state.items()
        if key.endswith(theirs)
    }
    recorded = facts | {
        "num_attention_heads": 4,
        "norm_epsilon": 1e-5,
        "rotary_base": 500000,
        "vocab_size": 64,
        "untie_embeddings_and_output_weights": not settings.get("tie_word_embeddings", False),
    }
    tensors, problems = stack_experts(catalog({key: tuple(value.shape) for key, value in full.items()}))
    assert not problems
    derived = derive_config(recorded, tensors)
    assert derived.config is not None, derived.missing
    (tmp_path / "config.json").write_text(json.dumps(dict(derived.config) | {"torch_dtype": "float32"}))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(again) is type(model)
    assert again.dtype == torch.float32
    shapes = [{key: value.shape for key, value in one.named_parameters()} for one in (again, model)]
    assert shapes[0] == shapes[1]
    tokens = torch.tensor([[1, 9, 3, 16, 8, 2, 11, 40, 41, 42, 7, 5]])
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)
