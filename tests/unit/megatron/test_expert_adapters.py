"""Adapters of experts, from stacks as Megatron has them to PEFT's names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from assembled import ROOT, gather, store
from unshard.checkpoint import Checkpoint
from unshard.dtypes import F32
from unshard.families import translate
from unshard.families.translation import Translation

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
    ("inner", "rows", "shared"),
    [((2, 6), (10, 2), 2), ((2, 6), (3, 10, 2), 1), ((3, 2, 6), (10, 2), 1)],
    ids=["one for all", "shared A", "shared B"],
)
def test_what_experts_share_each_of_them_gets(
    inner: tuple[int, ...], rows: tuple[int, ...], shared: int, tmp_path: Path
) -> None:
    """`share_expert_adapters` and `experts_shared_outer_loras` of Megatron-Bridge."""
    checkpoint, found = translated(tmp_path, inner, rows)
    assert not found.problems
    (note,) = found.notes
    assert len(note.tensors) == shared
    a, b = [
        np.frombuffer(gather(tensor, {ROOT: tmp_path}), np.float32).reshape(tensor.shape)
        for tensor in checkpoint.tensors.values()
    ]
    for expert in range(3):
        module = f"model.layers.1.mlp.experts.{expert}.up_proj"
        of_one = [gather(found.tensors[f"{module}.lora_{side}.default.weight"], {ROOT: tmp_path}) for side in "AB"]
        own_b = b[5:] if b.ndim == 2 else b[expert, 5:]
        assert of_one == [(a if a.ndim == 2 else a[expert]).tobytes(), own_b.tobytes()]


@pytest.mark.parametrize(
    ("inner", "rows", "why"),
    [
        ((3, 2, 6), (2, 10, 2), "linear_in has shape [3, 2, 6], linear_out [2, 10, 2]"),
        ((3, 2, 6), (3, 9, 2), "does not divide by 2"),
        ((6,), (10,), "linear_in has shape [6], linear_out [10]"),
        ((4, 2, 6), (4, 10, 2), "is for 4 experts, where config.json says 3"),
        ((1, 3, 2, 6), (1, 3, 10, 2), "linear_in has shape"),
        ((0, 2, 6), (0, 10, 2), "experts"),
    ],
)
def test_matrices_that_are_no_stacks_of_experts_are_a_problem(
    inner: tuple[int, ...], rows: tuple[int, ...], why: str, tmp_path: Path
) -> None:
    (problem,) = translated(tmp_path, inner, rows)[1].problems
    assert "`decoder.layers.1.mlp.experts.linear_fc1.adapter`" in problem.message
    assert why in problem.message
