"""Faults from the field with torchtitan's own models."""

from __future__ import annotations

from pathlib import Path

from field_cases import merge, refuse, truth, truth_arrays, words

import dcp_bytes as db
from fsdp_bytes import Array
from golden_set import COMMITTED

CASE = "accelerate_fsdp2"
NAMES = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "model.layers": "layers", "lm_head": "output",
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def write_titan(directory: Path) -> Path:
    """The golden Llama as torchtitan stores it: rows of each head in rotary pairs."""
    state: dict[str, Array] = {}
    for name, array in truth_arrays(CASE).items():
        for heads, module in ((4, "q_proj"), (2, "k_proj")):
            if f".{module}." in name:
                pairs = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2)
                array = pairs.reshape(array.shape).copy()
        for hf, titan in NAMES.items():
            name = name.replace(hf, titan)
        state[name] = array
    db.save(directory, state)
    return directory


def test_rows_of_rotary_pairs_come_into_the_order_of_transformers(tmp_path: Path) -> None:
    """torchtitan#1291: DCP → torch → Meta's names → HF, and the model that came out wrote nothing readable."""
    report, found = merge(write_titan(tmp_path / "step-100"), tmp_path / "out", config=COMMITTED / CASE / "truth")
    assert found == truth(CASE)
    assert "for 4 heads (2 of keys)" in words(report)


def test_names_of_torchtitan_are_not_written_for_those_of_transformers(tmp_path: Path) -> None:
    """The same: a file under other names loads with random weights."""
    source = write_titan(tmp_path / "step-100")
    assert "--config DIR" in str(refuse(source, tmp_path / "out"))
    report, found = merge(source, tmp_path / "stored", weights_only=True)
    assert "layers.0.attention.wq.weight" in found
    assert "stored names were kept" in words(report)
