"""Models in torchtitan's names: through torch's own DCP to the file of save_pretrained, and to the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import torch.distributed.checkpoint as dcp  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from megatron.checking import assert_same, random_model, read_model  # noqa: E402
from titan.forward import forward  # noqa: E402
from titan.from_hf import AGES, to_titan  # noqa: E402
from unshard.api import merge  # noqa: E402
from unshard.errors import ModelError  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

TEXT = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "intermediate_size": 24,
    "vocab_size": 40, "num_hidden_layers": 3, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    "num_experts_per_tok": 2, "tie_word_embeddings": False,
}  # fmt: skip
LATENT = {
    **TEXT, "num_key_value_heads": 4, "n_routed_experts": 4, "moe_intermediate_size": 20, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 12,
    "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10, "num_nextn_predict_layers": 0,
}  # fmt: skip
del LATENT["head_dim"]
EXPERTS = {"num_experts": 5, "moe_intermediate_size": 20}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_gqa1": ("llama", {"num_key_value_heads": 1, "head_dim": 8}),
    "llama_mha": ("llama", {"num_key_value_heads": 4}),
    "llama_bias": ("llama", {"attention_bias": True}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"head_dim": 8}),
    "qwen3": ("qwen3", {}),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "qwen3_moe_mixed": ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [1]}),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "deepseek_v3_16b": ("deepseek_v3", {**LATENT, "q_lora_rank": None}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "head_dim": 8}),
}


def build(name: str, dtype: Any = torch.float32, **more: Any) -> Any:
    model_type, settings = MODELS[name]
    base = LATENT if model_type == "deepseek_v3" else TEXT
    return random_model(transformers.CONFIG_MAPPING[model_type](**{**base, **settings, **more}), dtype=dtype)


def save(state: dict[str, Any], place: Path) -> Path:
    """As torchtitan does: the model's names at the top, beside the other states of training."""
    optimizer = {f"state.{name}.exp_avg": torch.zeros_like(value) for name, value in state.items()}
    others = {"optimizer": optimizer, "train_state": {"step": torch.tensor(7)}, "lr_scheduler": {"last_epoch": 7}}
    dcp.save({**state, **others}, checkpoint_id=place, no_dist=True)
    return place


@pytest.mark.parametrize("age", AGES)
@pytest.mark.parametrize("name", MODELS)
def test_what_torchtitan_stores_becomes_the_file_of_save_pretrained(name: str, age: str, tmp_path: Path) -> None:
    model = build(name, torch.bfloat16 if name.endswith("tied") else torch.float32)
    model.save_pretrained(tmp_path / "truth")
    truth = read_model(tmp_path / "truth")
    save(to_titan(truth, model.config, AGES[age]), tmp_path / "step-7")
    merge(tmp_path / "step-7", tmp_path / "out", config=tmp_path / "truth")
    assert_same(read_model(tmp_path / "out"), truth)
    type(model).from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("age", ["v0.2.2", "2026-08"])
def test_layers_of_further_tokens_lie_behind_the_others(age: str, tmp_path: Path) -> None:
    model = build("deepseek_v3", num_nextn_predict_layers=1)
    model.save_pretrained(tmp_path / "truth")
    file = tmp_path / "truth" / "model.safetensors"
    state = load_file(file)
    state |= {
        name.replace("layers.2.", "layers.3."): value + 1 for name, value in state.items() if ".layers.2." in name
    }
    for module in ("enorm", "hnorm", "shared_head.norm"):
        state[f"model.layers.3.{module}.weight"] = torch.randn(32)
    state["model.layers.3.eh_proj.weight"] = torch.randn(32, 64)
    save_file(state, file, {"format": "pt"})
    save(to_titan(state, model.config, AGES[age]), tmp_path / "step-7")
    merge(tmp_path / "step-7", tmp_path / "out", config=tmp_path / "truth")
    assert_same(read_model(tmp_path / "out"), state)


@pytest.mark.parametrize("name", ["llama", "llama_gqa1", "llama_mha", "qwen3", "deepseek_v3"])
@torch.no_grad()
def test_the_model_computes_what_torchtitan_computes(name: str, tmp_path: Path) -> None:
    """Random tensors under torchtitan's names: nothing here knows how its adapters convert."""
    model = build(name, **({"first_k_dense_replace": 3} if name == "deepseek_v3" else {}))
    model.config.save_pretrained(tmp_path / "config")
    generator = torch.Generator().manual_seed(1)
    state = {
        titan: torch.randn(value.shape, generator=generator) / 4 + titan.endswith("norm.weight")
        for titan, value in to_titan({**model.state_dict()}, model.config).items()
    }
    save(state, tmp_path / "step-7")
    merge(tmp_path / "step-7", tmp_path / "out", config=tmp_path / "config")
    tokens = torch.tensor([1, 9, 3, 16, 8, 2, 11])
    found = type(model).from_pretrained(tmp_path / "out").eval()(input_ids=tokens[None]).logits[0]
    right = forward(state, tokens, model.config)
    assert right.abs().max() > 1
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


def test_metas_own_file_is_the_same(tmp_path: Path) -> None:
    """`consolidated.00.pth`: the names of v0.2.2, and angles of rotary positions."""
    model = build("llama", torch.bfloat16)
    model.save_pretrained(tmp_path / "truth")
    truth = read_model(tmp_path / "truth")
    state = to_titan(truth, model.config, AGES["v0.2.2"]) | {"rope.freqs": torch.ones(6)}
    torch.save(state, tmp_path / "consolidated.00.pth")
    report = merge(tmp_path / "consolidated.00.pth", tmp_path / "out", config=tmp_path / "truth")
    assert_same(read_model(tmp_path / "out"), truth)
    assert any("rotary angles" in note.text and note.tensors == ("rope.freqs",) for note in report.notes)


def test_stored_angles_tell_how_many_rows_make_a_head(tmp_path: Path) -> None:
    """Four heads of 12 rows, or eight of 6: the shapes of weights are the same."""
    model = build("llama", num_attention_heads=8, num_key_value_heads=4, head_dim=6)
    model.config.save_pretrained(tmp_path / "wrong")
    state = to_titan(model.state_dict(), model.config)
    save(state | {"freqs_cis": torch.ones(5, 6, dtype=torch.complex64)}, tmp_path / "step-7")
    with pytest.raises(ModelError, match=r"heads of 6 rows, but freqs_cis has angles for heads of 12"):
        merge(tmp_path / "step-7", tmp_path / "out", config=tmp_path / "wrong")
