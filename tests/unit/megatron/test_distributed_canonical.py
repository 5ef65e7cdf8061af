"""From the keys of distributed checkpoints to the canonical catalog."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from assembled import ROOT, gather, store
from unshard.dtypes import BF16, F32
from unshard.formats.megatron.distributed.canonical import to_canonical
from unshard.tensors import Tensor


class Stage:
    """Random tensors under some keys, and their values."""

    def __init__(self, directory: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        self.roots = {ROOT: directory}
        self.stored = store(directory, {key: (F32, shape) for key, shape in shapes.items()})

    def value(self, tensor: Tensor) -> np.ndarray:
        return np.frombuffer(gather(tensor, self.roots), np.uint32).reshape(tensor.shape)

    def canonical(self) -> dict[str, np.ndarray]:
        tensors, problems = to_canonical(self.stored)
        assert list(problems) == []
        assert all(tensor.name == name for name, tensor in tensors.items())
        return {name: self.value(tensor) for name, tensor in tensors.items()}

    def problem(self) -> str:
        _, problems = to_canonical(self.stored)
        assert len(problems) == 1
        return str(problems[0])


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_stacked_layers_become_one_tensor_each(tmp_path: Path) -> None:
    keys = {
        "embedding.word_embeddings.weight": (8, 4),
        "decoder.layers.self_attention.linear_qkv.weight": (3, 6, 4),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": (3, 4),
        "vision_model.decoder.layers.mlp.linear_fc2.bias": (2, 5),
        "decoder.final_layernorm.weight": (4,),
    }
    stage = Stage(tmp_path, keys)
    expected = {}
    for key in keys:
        block, found, rest = key.partition("layers.")
        values = stage.value(stage.stored[key])
        expected |= {f"{block}layers.{i}.{rest}": row for i, row in enumerate(values)} if found else {key: values}
    same(stage.canonical(), expected)


def test_layers_with_numbers_stay_and_wrappers_go(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"module.decoder.layers.11.self_attention.linear_proj.weight": (4, 4)})
    assert list(stage.canonical()) == ["decoder.layers.11.self_attention.linear_proj.weight"]
    stage = Stage(tmp_path, {"model.module.module.mtp.layers.0.transformer_layer.input_layernorm.weight": (4,)})
    assert list(stage.canonical()) == ["mtp.layers.0.transformer_layer.input_layernorm.weight"]


def test_all_experts_of_all_layers(tmp_path: Path) -> None:
    key = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    stage = Stage(tmp_path, {key: (2, 3, 4, 5)})
    values = stage.value(stage.stored[key])
    same(stage.canonical(), {f"decoder.layers.{i}.mlp.experts.linear_fc1.weight": values[i] for i in range(2)})


@pytest.mark.parametrize(
    "pattern",
    [
        "experts.{}.linear_fc1.weight",
        "local_experts.{}.linear_fc1.weight",
        "linear_fc1.weight{}",
        "experts.linear_fc1.weight{}",
    ],
)
@pytest.mark.parametrize("halves", [False, True])
def test_single_experts_however_they_are_named(tmp_path: Path, pattern: str, halves: bool) -> None:
    stem = "model.module.decoder.layers.0.mlp.experts."
    parts = ["_w", "_v"] if halves else [""]
    keys = {f"{stem}{pattern.format(number)}{part}": (6 // len(parts), 4) for number in range(12) for part in parts}
    stage = Stage(tmp_path, keys)
    values = np.stack([stage.value(tensor) for tensor in stage.stored.values()]).reshape(12, 6, 4)
    same(stage.canonical(), {"decoder.layers.0.mlp.experts.linear_fc1.weight": values})


def test_gate_and_up_of_dense_and_shared_layers(tmp_path: Path) -> None:
    stems = ["decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.1.mlp.shared_experts.linear_fc1.bias"]
    stage = Stage(
        tmp_path,
        {f"{stems[0]}_v": (3, 4), f"{stems[1]}_w": (3,), f"{stems[0]}_w": (3, 4), f"{stems[1]}_v": (3,)},
    )
    values = {key: stage.value(tensor) for key, tensor in stage.stored.items()}
    same(stage.canonical(), {stem: np.concatenate([values[f"{stem}_w"], values[f"{stem}_v"]]) for stem in stems})


def test_a_stack_of_gates_is_joined_inside_each_expert(tmp_path: Path) -> None:
    stem = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    stage = Stage(tmp_path, {f"{stem}_w": (1, 2, 3, 4), f"{stem}_v": (1, 2, 3, 4)})
    gate, up = [stage.value(stage.stored[f"{stem}_{half}"])[0] for half in "wv"]
    same(stage.canonical(), {"decoder.layers.0.mlp.experts.linear_fc1.weight": np.concatenate([gate, up], 1)})


def test_sections_of_a_gated_delta_net(tmp_path: Path) -> None:
    stem = "decoder.layers.2.self_attention"
    rows = {"query": 4, "key": 4, "value": 6, "z": 6, "beta": 2, "alpha": 2}
    keys = {f"{stem}.in_proj.weight.{part}": (size, 5) for part, size in reversed(rows.items())}
    keys |= {f"{stem}.conv1d.weight.{part}": (rows[part], 1, 4) for part in ("value", "query", "key")}
    stage = Stage(tmp_path, keys)
    values = {key: stage.value(tensor) for key, tensor in stage.stored.items()}
    expected = {
        f"{stem}.in_proj.weight": np.concatenate([values[f"{stem}.in_proj.weight.{part}"] for part in rows]),
        f"{stem}.conv1d.weight": np.concatenate(
            [values[f"{stem}.conv1d.weight.{part}"] for part in ("query", "key", "value")]
        ),
    }
    same(stage.canonical(), expected)


def test_a_weight_norm_is_no_half_of_an_mlp(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"audio.conv.weight_v": (3,), "audio.conv.weight_g": (3,)})
    assert list(stage.canonical()) == ["audio.conv.weight_v", "audio.conv.weight_g"]


def test_parts_that_are_missing(tmp_path: Path) -> None:
    problem = Stage(tmp_path, {"decoder.layers.0.mlp.linear_fc1.weight_w": (3, 4)}).problem()
    assert "`decoder.layers.0.mlp.linear_fc1.weight` is stored in the parts w, v, of which there is no v" in problem
    keys = {f"decoder.layers.0.self_attention.conv1d.weight.{part}": (3, 1, 4) for part in ("query", "value")}
    assert "there is no key" in Stage(tmp_path, keys).problem()


def test_parts_that_do_not_fit(tmp_path: Path) -> None:
    stem = "decoder.layers.0.mlp.linear_fc1.weight"
    assert "do not fit together" in Stage(tmp_path, {f"{stem}_w": (3, 4), f"{stem}_v": (3, 5)}).problem()
    assert "do not fit together" in Stage(tmp_path, {f"{stem}_w": (3,), f"{stem}_v": (3,)}).problem()
    whole = Stage(tmp_path, {stem: (6, 4), f"{stem}_w": (3, 4), f"{stem}_v": (3, 4)})
    assert "whole and in parts" in whole.problem()


def test_keys_that_mean_the_same(tmp_path: Path) -> None:
    keys = {"decoder.layers.0.input_layernorm.weight": (4,), "decoder.layers.input_layernorm.weight": (1, 4)}
    assert "stored twice, under different keys: `decoder.layers.0.input_layernorm.weight`" in (
        Stage(tmp_path, keys).problem()
    )


def test_stacks_of_different_depth(tmp_path: Path) -> None:
    keys = {"decoder.layers.input_layernorm.weight": (4, 2), "decoder.layers.mlp.linear_fc2.weight": (3, 2, 2)}
    problem = Stage(tmp_path, keys).problem()
    assert "`decoder.layers`: how many layers are there? 3 in `decoder.layers.mlp.linear_fc2.weight`; 4 in" in problem


def test_a_depth_that_would_fill_the_memory() -> None:
    key = "decoder.layers.mlp.router.weight"
    tensors, problems = to_canonical({key: Tensor(key, BF16, (1 << 40, 4), ())})
    assert tensors == {}
    assert ["layers are too many to be true" in str(problem) for problem in problems] == [True]


def test_a_stack_that_is_a_scalar(tmp_path: Path) -> None:
    scalar = store(tmp_path, {"decoder.layers.mlp.router.expert_bias": (BF16, ())})
    _, problems = to_canonical(scalar)
    assert ["is a scalar" in str(problem) for problem in problems] == [True]
