"""Megatron-DeepSpeed without its pipeline module: a nested module per tensor-parallel rank, as Megatron-LM nests it."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from assembled import gather
from unshard.opening import open_checkpoint
from unshard.options import MergeOptions

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

HIDDEN, WIDTH, HEADS = 8, 6, 4
ARGS = Namespace(
    num_layers=1,
    hidden_size=HIDDEN,
    num_attention_heads=HEADS,
    ffn_hidden_size=WIDTH,
    num_key_value_heads=None,
    normalization="rmsnorm",
    tensor_model_parallel_size=2,
)


def wholes() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "word_embeddings": torch.randn(10, HIDDEN),
        "query_key_value": torch.randn(3 * HIDDEN, HIDDEN),
        "dense": torch.randn(HIDDEN, HIDDEN),
        "gate": torch.randn(WIDTH, HIDDEN),
        "up": torch.randn(WIDTH, HIDDEN),
        "dense_4h_to_h": torch.randn(HIDDEN, WIDTH),
        "norm": torch.randn(HIDDEN),
    }


def save(directory: Path, rank: int, **more: Any) -> None:
    """The model states of one rank, as `state_dict_for_save_checkpoint` nests the module."""
    whole = wholes()

    def cut(name: str, axis: int) -> Any:
        return whole[name].chunk(2, axis)[rank].clone()

    encoder = {
        "layers.0.input_layernorm.weight": whole["norm"],
        "layers.0.self_attention.query_key_value.weight": cut("query_key_value", 0),
        "layers.0.self_attention.dense.weight": cut("dense", 1),
        "layers.0.post_attention_layernorm.weight": whole["norm"],
        "layers.0.mlp.dense_h_to_4h.weight": torch.cat([cut("gate", 0), cut("up", 0)]),
        "layers.0.mlp.dense_4h_to_h.weight": cut("dense_4h_to_h", 1),
        "final_layernorm.weight": whole["norm"],
    }
    module = {
        "language_model": {"embedding": {"word_embeddings": {"weight": cut("word_embeddings", 0)}}, "encoder": encoder}
    }
    states = {"module": module, "param_shapes": None, "args": ARGS, "checkpoint_version": 3.0, "global_steps": 1}
    directory.mkdir(exist_ok=True)
    torch.save({**states, "mp_world_size": 2, **more}, directory / f"mp_rank_{rank:02d}_model_states.pt")


def test_ranks_become_the_canonical_catalog(tmp_path: Path) -> None:
    for rank in (0, 1):
        save(tmp_path / "global_step1", rank)
    checkpoint = open_checkpoint(tmp_path / "global_step1", MergeOptions())
    assert not checkpoint.problems
    assert checkpoint.dialect == "megatron"
    assert checkpoint.facts["num_query_groups"] == HEADS
    whole = wholes()
    layer = "decoder.layers.0"
    expected = {
        "embedding.word_embeddings.weight": whole["word_embeddings"],
        f"{layer}.input_layernorm.weight": whole["norm"],
        f"{layer}.self_attention.linear_qkv.weight": whole["query_key_value"],
        f"{layer}.self_attention.linear_proj.weight": whole["dense"],
        f"{layer}.pre_mlp_layernorm.weight": whole["norm"],
        f"{layer}.mlp.linear_fc1.weight": torch.cat([whole["gate"], whole["up"]]),
        f"{layer}.mlp.linear_fc2.weight": whole["dense_4h_to_h"],
        "decoder.final_layernorm.weight": whole["norm"],
    }
    assert checkpoint.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert gather(checkpoint.tensors[name], checkpoint.roots) == tensor.numpy().tobytes(), name


def test_arguments_of_another_model_are_an_error(tmp_path: Path) -> None:
    for rank in (0, 1):
        save(tmp_path / "global_step1", rank, args=Namespace(**{**vars(ARGS), "ffn_hidden_size": 2 * WIDTH}))
    (problem,) = open_checkpoint(tmp_path / "global_step1", MergeOptions()).problems
    assert "args.ffn_hidden_size is 12" in problem.message


def test_files_of_different_runs_are_an_error(tmp_path: Path) -> None:
    save(tmp_path / "global_step1", 0)
    save(tmp_path / "global_step1", 1, mp_world_size=4)
    found = [str(problem) for problem in open_checkpoint(tmp_path / "global_step1", MergeOptions()).problems]
    assert any("speak of 2, 4 model-parallel ranks" in problem for problem in found)


def test_experts_of_autoep_are_refused(tmp_path: Path) -> None:
    for rank in (0, 1):
        save(tmp_path / "global_step1", rank, ds_autoep_layers=[{"num_experts": 4}])
    found = [str(problem) for problem in open_checkpoint(tmp_path / "global_step1", MergeOptions()).problems]
    assert any("AutoEP" in problem for problem in found)
