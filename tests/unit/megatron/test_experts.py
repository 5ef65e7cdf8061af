"""Stacking experts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from assembled import ROOT, gather, store
from unshard.dtypes import BF16, F32
from unshard.formats.megatron.experts import stack_experts
from unshard.tensors import Tensor

LAYER = "decoder.layers.3.mlp"


def experts(directory: Path, numbers: list[int], layer: str = LAYER) -> dict[str, Tensor]:
    names = [f"{layer}.experts.local_experts.{number}.linear_fc1.weight" for number in numbers]
    return store(directory, dict.fromkeys(names, (F32, (4, 3))), seed=len(layer))


def test_stacks_by_global_number(tmp_path: Path) -> None:
    tensors = experts(tmp_path, [2, 0, 10, 1, *range(3, 10)])
    stacked, problems = stack_experts(tensors)
    assert problems == ()
    whole = stacked[f"{LAYER}.experts.linear_fc1.weight"]
    assert (whole.name, whole.shape, whole.dtype) == (f"{LAYER}.experts.linear_fc1.weight", (11, 4, 3), F32)
    found = np.frombuffer(gather(whole, {ROOT: tmp_path}), np.uint8).reshape(11, -1)
    for number in range(11):
        one = tensors[f"{LAYER}.experts.local_experts.{number}.linear_fc1.weight"]
        assert found[number].tobytes() == gather(one, {ROOT: tmp_path})


def test_all_else_stays_where_it_was(tmp_path: Path) -> None:
    others = store(tmp_path, {"a": (F32, (2,)), "z": (F32, (3,))})
    stacked, _ = stack_experts({"a": others["a"], **experts(tmp_path, [0, 1]), "z": others["z"]})
    assert list(stacked) == ["a", f"{LAYER}.experts.linear_fc1.weight", "z"]
    assert stack_experts(others) == (others, ())


def test_a_gap_names_the_missing_experts(tmp_path: Path) -> None:
    second = "decoder.layers.4.mlp"
    tensors = experts(tmp_path, [0, 3, 6], LAYER) | experts(tmp_path, [0, 3, 6], second)
    stacked, problems = stack_experts(tensors)
    assert len(problems) == 1
    assert "experts 1-2, 4-5 missing" in str(problems[0])
    assert f"`{LAYER}.experts.linear_fc1.weight`, `{second}.experts.linear_fc1.weight`" in str(problems[0])
    assert stacked == {}


def test_the_router_tells_how_many_there_must_be(tmp_path: Path) -> None:
    router = store(tmp_path, {f"{LAYER}.router.weight": (F32, (4, 3))})
    _, problems = stack_experts(router | experts(tmp_path, [0, 1, 2]))
    assert ["expert 3 missing" in str(problem) for problem in problems] == [True]
    assert stack_experts(router | experts(tmp_path, [0, 1, 2, 3]))[1] == ()


def test_a_high_number_costs_nothing(tmp_path: Path) -> None:
    _, problems = stack_experts(experts(tmp_path, [999_999]))
    assert "experts 0-999998 missing" in str(problems[0])


@pytest.mark.parametrize(("dtype", "shape"), [(BF16, (4, 3)), (F32, (4, 4))])
def test_experts_that_differ(tmp_path: Path, dtype: object, shape: tuple[int, ...]) -> None:
    odd = f"{LAYER}.experts.local_experts.1.linear_fc1.weight"
    _, problems = stack_experts(experts(tmp_path, [0]) | store(tmp_path, {odd: (dtype, shape)}))  # type: ignore[dict-item]
    assert ["differ in shape or dtype" in str(problem) for problem in problems] == [True]


def test_experts_that_are_stored_twice(tmp_path: Path) -> None:
    whole = store(tmp_path, {f"{LAYER}.experts.linear_fc1.weight": (F32, (2, 4, 3))})
    _, problems = stack_experts(whole | experts(tmp_path, [0, 1]))
    assert ["stored twice" in str(problem) for problem in problems] == [True]
