"""Layers of further tokens, and matrices that Megatron fuses or keeps in float32: transformers builds no such model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from megatron.checking import assert_same, random_model, read_model  # noqa: E402
from megatron.from_hf import deepseek  # noqa: E402
from megatron.writer import write_legacy, write_torch_dist  # noqa: E402
from unshard.cli import main  # noqa: E402

pytestmark = pytest.mark.torch

SIZES = {
    "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 24, "vocab_size": 40,
    "num_hidden_layers": 2, "n_routed_experts": 4, "moe_intermediate_size": 12, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 2,
}  # fmt: skip
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10}
MODELS = {
    "deepseek_v3": {**SIZES, **LATENT},
    "glm4_moe": {**SIZES, "attention_bias": True, "num_key_value_heads": 2},
    "glm4_moe_lite": {**SIZES, **LATENT},
}
ARGS = {"swiglu": True, "num_layers": 2, "q_lora_rank": 8, "kv_lora_rank": 12, "qk_pos_emb_head_dim": 4}

State = dict[str, torch.Tensor]


def make_model(model_type: str, place: Path) -> tuple[State, Any]:
    """A random model with its layers of further tokens, and its config, which is saved below `place`."""
    model = random_model(transformers.CONFIG_MAPPING[model_type](**MODELS[model_type]))
    model.save_pretrained(place)
    state = read_model(place)
    noise = torch.Generator().manual_seed(1)
    last = "model.layers.1."
    shapes = {name.removeprefix(last): value.shape for name, value in state.items() if name.startswith(last)}
    shapes |= dict.fromkeys(("enorm.weight", "hnorm.weight", "shared_head.norm.weight"), torch.Size([16]))
    shapes["eh_proj.weight"] = torch.Size([16, 32])
    for layer in (2, 3):
        state |= {f"model.layers.{layer}.{part}": torch.randn(*s, generator=noise) for part, s in shapes.items()}
    return state, model.config


def merge(checkpoint: Path, config: Path, output: Path, *options: str) -> State:
    assert main(["merge", str(checkpoint), str(output), "--config", str(config), *options]) == 0
    return read_model(output)


@pytest.mark.parametrize("model_type", MODELS)
def test_layers_of_further_tokens_follow_those_of_the_decoder(model_type: str, tmp_path: Path) -> None:
    state, config = make_model(model_type, tmp_path / "config")
    full = deepseek.to_megatron(state, config)
    assert "mtp.layers.1.transformer_layer.mlp.experts.local_experts.3.linear_fc1.weight" in full
    write_legacy(tmp_path / "checkpoint", full, tp=2, pp=2, ep=2, etp=1, args=ARGS)
    assert_same(merge(tmp_path / "checkpoint", tmp_path / "config", tmp_path / "output"), state)


@pytest.mark.parametrize("model_type", MODELS)
def test_layers_of_further_tokens_in_a_distributed_checkpoint(model_type: str, tmp_path: Path) -> None:
    state, config = make_model(model_type, tmp_path / "config")
    full = deepseek.to_megatron(state, config)
    write_torch_dist(tmp_path / "checkpoint", full, tp=2, homogeneous=False, args=ARGS)
    assert_same(merge(tmp_path / "checkpoint", tmp_path / "config", tmp_path / "output"), state)


def test_the_older_name_of_the_layer_in_a_layer_of_further_tokens(tmp_path: Path) -> None:
    state, config = make_model("glm4_moe", tmp_path / "config")
    full = deepseek.to_megatron(state, config)
    renamed = {name.replace(".transformer_layer.", ".mtp_model_layer."): value for name, value in full.items()}
    write_legacy(tmp_path / "checkpoint", renamed, te=False, args=ARGS)
    assert_same(merge(tmp_path / "checkpoint", tmp_path / "config", tmp_path / "output"), state)


def test_a_model_that_was_trained_without_them_is_written_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, config = make_model("deepseek_v3", tmp_path / "config")
    decoder = {
        name: value for name, value in state.items() if not name.startswith(("model.layers.2", "model.layers.3"))
    }
    write_legacy(tmp_path / "checkpoint", deepseek.to_megatron(decoder, config), args=ARGS)
    found = merge(tmp_path / "checkpoint", tmp_path / "config", tmp_path / "output", "--json")
    assert_same(found, decoder)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert any("num_nextn_predict_layers" in str(note) for note in report["notes"]), report["notes"]


def fuse_down_projections(full: Mapping[str, torch.Tensor]) -> State:
    """As FusedMLASelfAttention has them: one matrix, queries first, behind the norm that it holds."""
    fused: State = {}
    for name, value in full.items():
        module, _, part = name.rpartition("self_attention.linear_")
        if part == "q_down_proj.weight":
            other = full[f"{module}self_attention.linear_kv_down_proj.weight"]
            fused[f"{module}self_attention.linear_qkv_down_proj.weight"] = torch.cat([value, other])
        elif part != "kv_down_proj.weight":
            norm = "self_attention.linear_qkv_down_proj.layer_norm_"
            fused[name.replace("input_layernorm.", norm)] = value
    return fused


def test_fused_down_projections_come_apart(tmp_path: Path) -> None:
    state, config = make_model("deepseek_v3", tmp_path / "config")
    full = fuse_down_projections(deepseek.to_megatron(state, config))
    assert "decoder.layers.0.self_attention.linear_qkv_down_proj.weight" in full
    write_legacy(tmp_path / "checkpoint", full, tp=2, args=ARGS)
    assert_same(merge(tmp_path / "checkpoint", tmp_path / "config", tmp_path / "output"), state)


def test_routers_stay_as_they_are_stored_whatever_type_is_asked_for(tmp_path: Path) -> None:
    state, config = make_model("glm4_moe", tmp_path / "config")
    write_legacy(tmp_path / "checkpoint", deepseek.to_megatron(state, config), args=ARGS)
    found = merge(tmp_path / "checkpoint", tmp_path / "config", tmp_path / "output", "--dtype", "bf16")
    kept = (".mlp.gate.weight", ".mlp.gate.e_score_correction_bias")
    truth = {name: value if name.endswith(kept) else value.bfloat16() for name, value in state.items()}
    assert_same(found, truth)


def test_a_bias_of_the_router_in_float32_beside_weights_of_16_bits(tmp_path: Path) -> None:
    state, config = make_model("glm4_moe", tmp_path / "config")
    mixed = {name: value if name.endswith("_bias") else value.bfloat16() for name, value in state.items()}
    write_legacy(tmp_path / "checkpoint", deepseek.to_megatron(mixed, config), tp=2, ep=2, etp=1, args=ARGS)
    assert_same(merge(tmp_path / "checkpoint", tmp_path / "config", tmp_path / "output"), mixed)
