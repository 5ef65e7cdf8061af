"""`--map` through a whole merge: parameters of one's own in a known model, and a model that no family knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from megatron.checking import assert_same, random_model, read_model  # noqa: E402
from megatron.from_hf import llama  # noqa: E402
from megatron.writer import write_legacy  # noqa: E402
from unshard.cli import main  # noqa: E402

pytestmark = pytest.mark.torch

RULES = """
family = "llama"

[[rule]]
from = "decoder.layers.{layer}.self_attention.linear_scorer.weight"
to = "model.layers.{layer}.self_attn.scorer.weight"

[axes]
"decoder.layers.{layer}.self_attention.linear_scorer.weight" = 1
"""


@pytest.mark.parametrize("model_type", ["llama", "novel"])
def test_parameters_of_ones_own(model_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.LlamaConfig(
        hidden_size=48, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, num_hidden_layers=2,
        vocab_size=36,
    )  # fmt: skip
    random_model(config).save_pretrained(tmp_path / "truth")
    state = read_model(tmp_path / "truth")
    scorers = [torch.randn(6, 48) for _ in range(2)]
    full = llama.to_megatron(dict(state), config)
    full |= {f"decoder.layers.{i}.self_attention.linear_scorer.weight": value for i, value in enumerate(scorers)}
    write_legacy(tmp_path / "checkpoint", full, tp=2, dims={"linear_scorer.weight": 1})
    written = json.loads((tmp_path / "truth" / "config.json").read_text())
    (tmp_path / "truth" / "config.json").write_text(json.dumps({**written, "model_type": model_type}))
    typed = ["merge", str(tmp_path / "checkpoint"), str(tmp_path / "out"), "--config", str(tmp_path / "truth")]

    assert main(typed) != 0
    refusal = capsys.readouterr().err
    assert "linear_scorer" in refusal
    assert "--map FILE" in refusal
    (tmp_path / "rules.toml").write_text(RULES)
    assert main([*typed, "--map", str(tmp_path / "rules.toml")]) == 0
    expected = {f"model.layers.{i}.self_attn.scorer.weight": value for i, value in enumerate(scorers)}
    assert_same(read_model(tmp_path / "out"), state | expected)
    if model_type == "llama":
        assert "no parameters of LlamaForCausalLM are written all the same" in capsys.readouterr().out
