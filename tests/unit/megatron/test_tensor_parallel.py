"""The table of tensor-parallel layouts, name by name."""

from __future__ import annotations

from typing import Any

import pytest

from unshard.checkpoint import Shape
from unshard.formats.megatron.ranks.tensor_parallel import COLUMNS, REPLICATED, ROWS, Cut, Neighbours, cut_of

LAYER = "decoder.layers.3."


def cut(name: str, shape: Shape = (8, 4), vocabulary: int | None = None, **facts: Any) -> Cut | None:
    return cut_of(name, shape, Neighbours({name: shape}, facts, vocabulary))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("embedding.word_embeddings.weight", COLUMNS),
        ("language_model.embedding.word_embeddings.weight", COLUMNS),
        ("embedding.position_embeddings.weight", REPLICATED),
        ("decoder.final_layernorm.weight", REPLICATED),
        ("decoder.final_layernorm.bias", REPLICATED),
        (f"{LAYER}input_layernorm.weight", REPLICATED),
        (f"{LAYER}pre_mlp_layernorm.weight", REPLICATED),
        (f"{LAYER}self_attention.linear_qkv.weight", COLUMNS),
        (f"{LAYER}self_attention.linear_qkv.bias", COLUMNS),
        (f"{LAYER}self_attention.linear_qkv.layer_norm_weight", REPLICATED),
        (f"{LAYER}self_attention.linear_proj.weight", ROWS),
        (f"{LAYER}self_attention.linear_proj.bias", REPLICATED),
        (f"{LAYER}self_attention.linear_proj.post_layernorm.weight", REPLICATED),
        (f"{LAYER}self_attention.linear_q_proj.weight", COLUMNS),
        (f"{LAYER}self_attention.linear_q_up_proj.weight", COLUMNS),
        (f"{LAYER}self_attention.linear_q_up_proj.layer_norm_weight", REPLICATED),
        (f"{LAYER}self_attention.linear_kv_up_proj.weight", COLUMNS),
        (f"{LAYER}self_attention.kv_layernorm.weight", REPLICATED),
        (f"{LAYER}self_attention.core_attention.softmax_offset", COLUMNS),
        (f"{LAYER}self_attention.core_attention.indexer.linear_wq_b.weight", REPLICATED),
        (f"{LAYER}self_attention.A_log", COLUMNS),
        (f"{LAYER}self_attention.dt_bias", COLUMNS),
        (f"{LAYER}self_attention.out_proj.weight", ROWS),
        (f"{LAYER}self_attention.out_norm.weight", REPLICATED),
        (f"{LAYER}mixer.D", COLUMNS),
        (f"{LAYER}mixer.norm.weight", COLUMNS),
        (f"{LAYER}norm.weight", REPLICATED),
        (f"{LAYER}mlp.linear_fc2.weight", ROWS),
        (f"{LAYER}mlp.linear_fc2.bias", REPLICATED),
        (f"{LAYER}mlp.router.weight", REPLICATED),
        (f"{LAYER}mlp.router.expert_bias", REPLICATED),
        (f"{LAYER}mlp.router.bias", REPLICATED),
        (f"{LAYER}mlp.shared_experts.gate_weight", REPLICATED),
        (f"{LAYER}mlp.shared_experts.linear_fc2.weight", ROWS),
        (f"{LAYER}mlp.experts.local_experts.0.linear_fc2.weight", ROWS),
        ("mtp.layers.0.eh_proj.weight", COLUMNS),
        ("mtp.layers.0.enorm.weight", REPLICATED),
        ("mtp.layers.0.hnorm.weight", REPLICATED),
        ("vision_model.class_token", REPLICATED),
        ("vision_model.conv1.weight", REPLICATED),
        ("vision_model.ln_pre.weight", REPLICATED),
        ("vision_model.pos_embed.weight", REPLICATED),
        ("vision_model.merger.patch_norm.weight", REPLICATED),
        ("vision_model.decoder.layers.0.self_attention.linear_qkv.weight", COLUMNS),
        (f"{LAYER}self_attention.linear_qkv.adapter.linear_in.weight", COLUMNS),
        (f"{LAYER}self_attention.linear_qkv.adapter.linear_out.weight", COLUMNS),
        (f"{LAYER}self_attention.linear_qkv.adapter.adapter_q.linear_out.weight", COLUMNS),
        (f"{LAYER}mlp.linear_fc1.adapter.adapter_up.linear_out.weight", COLUMNS),
        (f"{LAYER}mlp.linear_fc1.adapter.adapter_gate.linear_in.weight", COLUMNS),
        (f"{LAYER}self_attention.linear_proj.adapter.linear_in.weight", ROWS),
        (f"{LAYER}self_attention.linear_proj.adapter.linear_out.weight", COLUMNS),
        (f"{LAYER}mlp.linear_fc2.adapter.linear_in.weight", ROWS),
        (f"{LAYER}self_attention.linear_gate.weight", None),
        (f"{LAYER}strange", None),
    ],
)
def test_by_name(name: str, expected: Cut | None) -> None:
    assert cut(name) == expected


class TestToldByShapes:
    def test_gate_and_up(self) -> None:
        name = f"{LAYER}mlp.linear_fc1.weight"
        second = f"{LAYER}mlp.linear_fc2.weight"
        assert cut_of(name, (8, 3), Neighbours({second: (3, 4)}, {})) == Cut(0, (4, 4))
        assert cut_of(name, (8, 3), Neighbours({second: (3, 8)}, {"swiglu": True})) == COLUMNS
        assert cut_of(f"{LAYER}mlp.linear_fc1.bias", (8,), Neighbours({second: (3, 4)}, {})) == Cut(0, (4, 4))

    def test_gate_and_up_alone(self) -> None:
        """Without the second layer the arguments tell; without them nothing does."""
        name = f"{LAYER}mlp.linear_fc1.weight"
        assert cut(name, swiglu=True) == Cut(0, (4, 4))
        assert cut(name, gated_linear_unit=True, swiglu=False) == Cut(0, (4, 4))
        assert cut(name, swiglu=False) == COLUMNS
        assert cut(name) is None

    def test_output_layer(self) -> None:
        assert cut("output_layer.weight", (8, 4), vocabulary=8) == COLUMNS
        assert cut("output_layer.weight", (2, 4), vocabulary=8) == REPLICATED
        assert cut("output_layer.weight", (8, 4), padded_vocab_size=16, tensor_model_parallel_size=2) == COLUMNS
        assert cut("output_layer.weight", (1, 4), padded_vocab_size=16, tensor_model_parallel_size=2) == REPLICATED
        assert cut("output_layer.weight", (1, 4)) == REPLICATED

    @pytest.mark.parametrize(
        ("which", "rows", "facts", "expected"),
        [
            ("q", 12, {}, REPLICATED),
            ("q", 6, {}, COLUMNS),
            ("kv", 22, {}, REPLICATED),
            ("kv", 11, {}, COLUMNS),
            ("kv", 22, {"kv_lora_rank": 20, "qk_pos_emb_head_dim": 24}, COLUMNS),
            ("kv", 44, {"kv_lora_rank": 20, "qk_pos_emb_head_dim": 24}, REPLICATED),
            ("qkv", 34, {"q_lora_rank": 12, "kv_lora_rank": 20, "qk_pos_emb_head_dim": 2}, REPLICATED),
            ("qkv", 17, {"q_lora_rank": 12, "kv_lora_rank": 20, "qk_pos_emb_head_dim": 2}, COLUMNS),
            ("qkv", 17, {}, None),
        ],
    )
    def test_down_projections(self, which: str, rows: int, facts: dict[str, int], expected: Cut | None) -> None:
        module = f"{LAYER}self_attention."
        shapes = {f"{module}linear_q_up_proj.weight": (48, 12), f"{module}linear_kv_up_proj.weight": (64, 20)}
        name = f"{module}linear_{which}_down_proj.weight"
        assert cut_of(name, (rows, 4), Neighbours(shapes, facts)) == expected

    @pytest.mark.parametrize(
        ("query", "key", "facts", "expected"),
        [
            (4, 4, {}, REPLICATED),
            (32, 16, {}, REPLICATED),
            (16, 8, {}, COLUMNS),
            (16, 8, {"kv_channels": 4}, COLUMNS),
            (16, 8, {"kv_channels": 16}, COLUMNS),
            (16, 8, {"kv_channels": 8}, COLUMNS),
            (16, 16, {"kv_channels": 16}, REPLICATED),
        ],
    )
    def test_norms_of_heads(self, query: int, key: int, facts: dict[str, int], expected: Cut) -> None:
        """Of one head, whole projections on each rank, and shares of them. On this rank q has 16 rows, k and v 8."""
        module = f"{LAYER}self_attention."
        shapes: dict[str, Shape] = {f"{module}linear_proj.weight": (24, 16), f"{module}linear_qkv.weight": (32, 24)}
        shapes |= {f"{module}q_layernorm.weight": (query,), f"{module}k_layernorm.weight": (key,)}
        near = Neighbours(shapes, facts)
        assert cut_of(f"{module}q_layernorm.weight", (query,), near) == expected
        if key != 16:
            assert cut_of(f"{module}k_layernorm.weight", (key,), near) == expected

    def test_sections_of_state_space_layers(self) -> None:
        mixer = f"{LAYER}mixer."
        shapes: dict[str, Shape] = {f"{mixer}A_log": (3,), f"{mixer}out_proj.weight": (9, 24)}
        near = Neighbours(shapes, {})
        assert cut_of(f"{mixer}in_proj.weight", (71, 9), near) == Cut(0, (24, 24, 10, 10, 3))
        assert cut_of(f"{mixer}conv1d.bias", (44,), near) == Cut(0, (24, 10, 10))
        net = {name.replace("mixer", "self_attention"): shape for name, shape in shapes.items()}
        assert cut_of(f"{LAYER}self_attention.in_proj.weight", (74, 9), Neighbours(net, {})) == Cut(
            0, (10, 10, 24, 24, 3, 3)
        )
        assert cut(f"{LAYER}self_attention.in_proj.weight", (74, 9)) is None
