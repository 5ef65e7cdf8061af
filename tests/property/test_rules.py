"""Rules: splitting equals numpy's splitting, and joining is the inverse, for every table and any values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import Array, Disk, cut_randomly, shard
from unshard.dtypes import F32
from unshard.families import FAMILIES
from unshard.families.rules import Rule, join, rename, split
from unshard.families.sizes import Sizes
from unshard.families.steps import Divide, Transpose, Unstack
from unshard.families.transformers5 import RENAMES
from unshard.tensors import Tensor

UNSIZED = Sizes({})

TABLES = {rules: name for name, rules in RENAMES.items()}
TABLES |= {family.rules: name for name, family in FAMILIES.items() if family.rules}


def draw_tensor(data: Any, disk: Disk, name: str, shape: tuple[int, ...]) -> tuple[Tensor, Array]:
    """A tensor cut at random, with values that are nowhere twice."""
    start = sum(len(file) for file in disk.files.values())
    array = (np.arange(int(np.prod(shape)), dtype=np.float32) + start).reshape(shape)
    boxes = cut_randomly(shape, lambda low, high: data.draw(st.integers(low, high)))
    return shard(disk, name, array, F32, boxes), array


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_experts_come_apart_as_numpy_takes_them_apart(data: Any) -> None:
    count, width, hidden = [data.draw(st.integers(1, 4)) for _ in range(3)]
    disk = Disk()
    packed, array = draw_tensor(data, disk, "model.layers.7.mlp.experts.gate_up_proj", (count, 2 * width, hidden))
    rule = Rule(
        "{stem}.experts.gate_up_proj",
        ("{stem}.experts.{expert}.gate.weight", "{stem}.experts.{expert}.up.weight"),
        (Unstack("expert"), Divide()),
    )
    result = split({packed.name: packed}, (rule,), UNSIZED)
    assert not result.problems
    for expert in range(count):
        for part, rows in (("gate", slice(0, width)), ("up", slice(width, None))):
            piece = result.tensors[f"model.layers.7.mlp.experts.{expert}.{part}.weight"]
            assert np.array_equal(disk.assemble(piece), array[expert, rows])
    assert len(result.tensors) == 2 * count


@settings(max_examples=20, deadline=None)
@given(st.data())
@pytest.mark.parametrize("rules", TABLES, ids=TABLES.values())
def test_joining_is_the_inverse_of_splitting(rules: tuple[Rule, ...], data: Any) -> None:
    disk = Disk()
    count, width, hidden = [data.draw(st.integers(2, 3)) for _ in range(3)]
    running: dict[str, Tensor] = {}
    arrays: dict[str, Array] = {}
    for layer in range(data.draw(st.integers(1, 2))):
        for rule in rules:
            stem = data.draw(st.sampled_from(["model", "thinker.model"])) + f".layers.{layer}"
            name = rule.whole.format(stem=stem, rest=f"layers.{layer}.norm.weight")
            if name in running or name.startswith("model.vision_tower.vision_model."):
                continue
            shape: tuple[int, ...] = (count, 2 * width, hidden) if rule.steps else (width,)
            running[name], arrays[name] = draw_tensor(data, disk, name, shape)
    there = split(running, rules, UNSIZED)
    assert not there.problems
    assert not set(there.tensors) & set(running) or TABLES[rules] == "qwen3_vl_moe"
    back = join(there.tensors, rules, UNSIZED)
    assert not back.problems
    assert set(back.tensors) == set(running)
    for name, tensor in back.tensors.items():
        assert tensor.name == name
        assert np.array_equal(disk.assemble(tensor), arrays[name])
    assert sorted(part for parts in back.origins.values() for part in parts) == sorted(there.tensors)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_steps_are_inverted_in_any_chain(data: Any) -> None:
    steps = data.draw(st.permutations([Unstack("expert"), Divide(data.draw(st.integers(0, 1))), Transpose()]))
    if steps.index(Unstack("expert")) == 2:
        steps = [steps[2], steps[0], steps[1]]  # three axes are needed until the stack is taken apart
    disk = Disk()
    whole, array = draw_tensor(data, disk, "w", (data.draw(st.integers(1, 3)), 4, 4))
    rule = Rule("w", ("a.{expert}", "b.{expert}"), tuple(steps))
    if array.shape[0] % 2 and isinstance(steps[0], Divide) and steps[0].axis == 0:
        return
    assert np.array_equal(disk.assemble(rule.join(rule.split(whole, UNSIZED), UNSIZED)), array)


def test_the_most_literal_pattern_wins_whatever_its_place() -> None:
    special, general = rename("model.vision.{rest}", "v.{rest}"), rename("model.{rest}", "m.{rest}")
    tensor = Tensor("model.vision.x", F32, (1,), ())
    for rules in ((special, general), (general, special)):
        assert list(split({tensor.name: tensor}, rules, UNSIZED).tensors) == ["v.x"]


def test_a_whole_whose_parts_are_not_all_there_is_left_in_parts() -> None:
    names = [f"m.mlp.experts.{expert}.{part}_proj.weight" for expert in range(3) for part in ("gate", "up")]
    names.remove("m.mlp.experts.1.up_proj.weight")
    parts = {name: Tensor(name, F32, (2, 3), ()) for name in names}
    assert list(join(parts, FAMILIES["olmoe"].rules, UNSIZED).tensors) == names


def test_two_tensors_that_would_take_one_name_are_a_problem() -> None:
    tensors = {name: Tensor(name, F32, (1,), ()) for name in ("model.visual.x", "visual.x")}
    result = split(tensors, FAMILIES["qwen2_vl"].rules, UNSIZED)
    assert "both become visual.x" in result.problems[0].message


@pytest.mark.parametrize("shape", [(3, 7, 4), (3, 8), (0, 8, 4), (1 << 17, 8, 4)])
def test_a_tensor_that_is_no_stack_of_experts_is_refused_before_it_is_taken_apart(shape: tuple[int, ...]) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    result = split({name: Tensor(name, F32, shape, ())}, FAMILIES["olmoe"].rules, UNSIZED)
    assert name in result.problems[0].message
    assert not result.tensors
