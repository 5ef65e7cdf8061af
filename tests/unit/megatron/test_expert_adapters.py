"""Adapters of experts, from stacks as Megatron has them to PEFT's names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from assembled import ROOT, gather, store
from unshard.checkpoint import Checkpoint
from unshard.dtypes import F32
from unshard.families import translate
from unshard.families.megatron.translation import Translation

CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": 6, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
    "num_experts": 3, "moe_intermediate_size": 5,
}  # fmt: skip
BASE = "decoder.layers.1.mlp.experts.linear_fc1.adapter.linear_"


def translated(place: Path, inner: tuple[int, ...], rows: tuple[int, ...]) -> tuple[Checkpoint, Translation]:
    tensors = store(place, {f"{BASE}in.weight": (F32, inner), f"{BASE}out.weight": (F32, rows)})
    checkpoint = Checkpoint("megatron", "test", {ROOT: place}, tensors, dialect="megatron")
    return checkpoint, translate(checkpoint, CONFIG)


def test_each_expert_gets_its_own_two_matrices(tmp_path: Path) -> None:
    checkpoint, found = translated(tmp_path, (3, 2, 6), (3, 10, 2))
    assert not found.problems
    inner, rows = [
        np.frombuffer(gather(tensor, {ROOT: tmp_path}), np.float32).reshape(tensor.shape)
        for tensor in checkpoint.tensors.values()
    ]
    expected = {}
    for expert in range(3):
        module = f"model.layers.1.mlp.experts.{expert}."
        for part, its_rows in (("gate_proj", rows[expert, :5]), ("up_proj", rows[expert, 5:])):
            expected[f"{module}{part}.lora_A.default.weight"] = inner[expert]
            expected[f"{module}{part}.lora_B.default.weight"] = its_rows
    assert sorted(found.tensors) == sorted(expected)
    for name, values in expected.items():
        assert gather(found.tensors[name], {ROOT: tmp_path}) == values.tobytes(), name


@pytest.mark.parametrize(
    ("inner", "rows"),
    [((2, 6), (10, 2)), ((3, 2, 6), (10, 2)), ((3, 2, 6), (2, 10, 2)), ((3, 2, 6), (3, 9, 2)), ((6,), (10,))],
)
def test_matrices_that_are_no_stacks_of_experts_are_a_problem(
    inner: tuple[int, ...], rows: tuple[int, ...], tmp_path: Path
) -> None:
    (problem,) = translated(tmp_path, inner, rows)[1].problems
    assert "decoder.layers.1.mlp.experts.linear_fc1" in problem.message
