"""Runs that left no config.json: one is derived and written, and what was assumed is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import unshard  # noqa: E402
from megatron.checking import random_model, read_model  # noqa: E402
from megatron.from_hf import llama  # noqa: E402
from megatron.writer import write_legacy  # noqa: E402
from unshard.errors import ModelError  # noqa: E402

pytestmark = pytest.mark.torch

ARGS = {
    "hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2, "group_query_attention": True,
    "ffn_hidden_size": 64, "kv_channels": 12, "swiglu": True, "normalization": "RMSNorm", "norm_epsilon": 1e-5,
    "position_embedding_type": "rope", "rotary_base": 20000, "untie_embeddings_and_output_weights": True,
    "add_bias_linear": False, "vocab_size": 37, "padded_vocab_size": 64, "max_position_embeddings": 128,
}  # fmt: skip


def save(place: Path, args: dict[str, object]) -> dict[str, torch.Tensor]:
    """A Llama of 37 words, padded to 64, on two ranks; its own tensors are returned."""
    config = transformers.LlamaConfig(
        hidden_size=48, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, num_hidden_layers=2,
        vocab_size=37, rms_norm_eps=1e-5,
    )  # fmt: skip
    model = random_model(config)
    model.save_pretrained(place / "truth")
    state = read_model(place / "truth")
    full = llama.to_megatron(dict(state), config)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        full[name] = torch.cat([full[name], torch.full((27, 48), 7.0)])
    write_legacy(place / "checkpoint", full, tp=2, args=args)
    return state


def test_a_config_is_derived_and_loads(tmp_path: Path) -> None:
    state = save(tmp_path, ARGS)
    report = unshard.merge(tmp_path / "checkpoint", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["vocab_size"], config["rope_theta"], config["torch_dtype"]) == (37, 20000, "float32")
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
    texts = [note.text for note in report.notes]
    assert any("derived from training's arguments" in text for text in texts)
    assert any("no tokenizer lies beside the checkpoint" in text for text in texts)
    assert any("27 rows of padding cut" in text for text in texts)


def test_what_nothing_tells_is_named(tmp_path: Path) -> None:
    save(tmp_path, {})
    with pytest.raises(ModelError, match="none can be derived") as caught:
        unshard.merge(tmp_path / "checkpoint", tmp_path / "out")
    assert "num_attention_heads" in str(caught.value)
    assert "--config DIR" in str(caught.value)
    assert not (tmp_path / "out").exists()
