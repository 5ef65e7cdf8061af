"""A Qwen2 of bf16 weights, as Megatron-LM saves it with `--ckpt-format torch` from 4 x 2 model-parallel ranks.

The names are TransformerEngine's. Each rank's file is written by PyTorch itself: the whole tensors, in Megatron's
layout, are cut as its layers cut them (Megatron-LM, `megatron/core/tensor_parallel/layers.py`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.models import Shape

if TYPE_CHECKING:
    import torch

SHAPES = {
    "0.5": Shape(1024, 2816, 12, 64_100, heads=16, groups=8, dtype="BF16", biased=True),
    "2": Shape(2048, 5632, 16, 64_100, heads=16, groups=8, dtype="BF16", biased=True),
}
"""By their size in GB."""

_TENSOR_PARALLEL = 4
_PIPELINE_PARALLEL = 2
_VOCABULARY_MULTIPLE = 128
"""Megatron pads the vocabulary to a multiple of this, times the tensor-parallel ranks."""


def write(shape: Shape, root: Path) -> None:
    """`run`, a directory of `--save` with one iteration."""
    import torch

    source = root / "run"
    saved = source / "iter_0000100"
    saved.mkdir(parents=True, exist_ok=True)
    (source / "latest_checkpointed_iteration.txt").write_text("100")
    for stage in range(_PIPELINE_PARALLEL):
        whole = dict(_stage(shape, stage))
        for rank in range(_TENSOR_PARALLEL):
            model = {name: _cut(name, values, rank) for name, values in whole.items()}
            state = {"args": _arguments(shape), "checkpoint_version": 3.0, "iteration": 100, "model": model}
            directory = saved / f"mp_rank_{rank:02}_{stage:03}"
            directory.mkdir(exist_ok=True)
            torch.save(state, directory / "model_optim_rng.pt")


def _stage(shape: Shape, stage: int) -> Iterator[tuple[str, np.ndarray]]:
    """The whole tensors of one pipeline stage in Megatron's layout, under the names that the stage gives them."""
    count = shape.layers // _PIPELINE_PARALLEL
    own = [f"model.layers.{layer}." for layer in range(stage * count, (stage + 1) * count)]
    wanted = ("model.embed_tokens.",) if stage == 0 else ("model.norm.", "lm_head.")
    weights = {name: values for name, values in shape.draw() if name.startswith((*own, *wanted))}
    if stage == 0:
        yield "embedding.word_embeddings.weight", _pad(weights["model.embed_tokens.weight"])
    for number, prefix in enumerate(own):
        for name, values in _layer(shape, weights, prefix):
            yield f"decoder.layers.{number}.{name}", values
    if stage == _PIPELINE_PARALLEL - 1:
        yield "decoder.final_layernorm.weight", weights["model.norm.weight"]
        yield "output_layer.weight", _pad(weights["lm_head.weight"])


def _layer(shape: Shape, weights: dict[str, np.ndarray], prefix: str) -> Iterator[tuple[str, np.ndarray]]:
    yield "self_attention.linear_proj.weight", weights[f"{prefix}self_attn.o_proj.weight"]
    yield "self_attention.linear_qkv.layer_norm_weight", weights[f"{prefix}input_layernorm.weight"]
    for kind in ("weight", "bias"):
        parts = [weights[f"{prefix}self_attn.{name}_proj.{kind}"] for name in "qkv"]
        grouped = [part.reshape(shape.groups, -1, shape.head_size, *part.shape[1:]) for part in parts]
        yield f"self_attention.linear_qkv.{kind}", np.concatenate(grouped, 1).reshape(-1, *parts[0].shape[1:])
    yield "mlp.linear_fc1.layer_norm_weight", weights[f"{prefix}post_attention_layernorm.weight"]
    halves = [weights[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]
    by_rank = [half.reshape(_TENSOR_PARALLEL, -1, shape.hidden) for half in halves]
    yield "mlp.linear_fc1.weight", np.concatenate(by_rank, 1).reshape(-1, shape.hidden)
    yield "mlp.linear_fc2.weight", weights[f"{prefix}mlp.down_proj.weight"]


def _pad(values: np.ndarray) -> np.ndarray:
    return np.pad(values, ((0, _padding(len(values))), (0, 0)))


def _padding(vocabulary: int) -> int:
    return -vocabulary % (_VOCABULARY_MULTIPLE * _TENSOR_PARALLEL)


def _cut(name: str, values: np.ndarray, rank: int) -> torch.Tensor:
    """A rank's part: columns of linear_proj and linear_fc2, rows of the others, all of the norms."""
    import torch

    if "norm" not in name:
        axis = 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0
        values = np.split(values, _TENSOR_PARALLEL, axis)[rank]
    return torch.from_numpy(values.copy()).view(torch.bfloat16)


def _arguments(shape: Shape) -> argparse.Namespace:
    return argparse.Namespace(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.intermediate,
        num_attention_heads=shape.heads,
        group_query_attention=True,
        num_query_groups=shape.groups,
        kv_channels=shape.head_size,
        padded_vocab_size=shape.vocabulary + _padding(shape.vocabulary),
        make_vocab_size_divisible_by=_VOCABULARY_MULTIPLE,
        swiglu=True,
        add_bias_linear=False,
        add_qkv_bias=True,
        normalization="RMSNorm",
        untie_embeddings_and_output_weights=True,
        position_embedding_type="rope",
        tensor_model_parallel_size=_TENSOR_PARALLEL,
        pipeline_model_parallel_size=_PIPELINE_PARALLEL,
        virtual_pipeline_model_parallel_size=None,
    )
