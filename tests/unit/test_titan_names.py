"""Which names are those of torchtitan's models."""

from __future__ import annotations

import pytest

from unshard.formats.dcp.titan_names import is_torchtitan

LLAMA = ["tok_embeddings.weight", "layers.0.attention_norm.weight", "layers.0.feed_forward.w1.weight", "norm.weight"]


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.attention.wq.weight",
        "layers.0.attention.qkv_linear.wq.weight",
        "layers.11.attention.qkv_linear.wqkv.weight",
        "layers.3.attention.wq_a.weight",
        "layers.3.attention.wkv_a.weight",
        "layers.0.attention.wq.lora_a.weight",
    ],
)
def test_a_projection_of_attention_tells(name: str) -> None:
    assert is_torchtitan([*LLAMA, name, "lm_head.weight"])


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"],
        ["embed_tokens.weight", "layers.0.self_attn.q_proj.weight", "norm.weight"],
        ["decoder.layers.0.self_attention.linear_qkv.weight", "output_layer.weight"],
        ["layers.0.self_attention.query_key_value.weight"],
        ["tok_embeddings.weight", "layers.0.attn.q_proj.weight", "layers.0.mlp.w1.weight", "norm.scale"],
        ["encoder.layer.0.attention.self.query.weight"],
        ["vision_encoder.transformer.layers.0.attention.wq.weight"],
    ],
    ids=["none", "hugging-face", "base-model", "megatron", "pre-core", "torchtune", "bert", "pixtral"],
)
def test_other_names_do_not(names: list[str]) -> None:
    assert not is_torchtitan(names)


@pytest.mark.parametrize("prefix", ["", "model."], ids=["gpt-fast", "internlm2"])
def test_one_matrix_for_queries_keys_and_values_is_another_layout(prefix: str) -> None:
    assert not is_torchtitan([f"{prefix}{name}" for name in [*LLAMA, "layers.0.attention.wqkv.weight"]])
