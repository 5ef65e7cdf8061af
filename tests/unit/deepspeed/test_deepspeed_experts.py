"""Experts of DeepSpeed's MoE: files that must be there, and whose partitions the optimizer's groups are."""

from __future__ import annotations

from pathlib import Path

import pytest

from shards import Shelf, numbers
from unshard.errors import FormatError
from unshard.formats.deepspeed.experts import (
    check_files,
    check_masters,
    expert_partitions,
    global_names,
    is_expert,
    merge_files,
)

MOE = "model.layers.0.mlp.deepspeed_moe.experts.deepspeed_experts"


def test_partitions_of_experts_lie_on_every_epth_rank() -> None:
    """As ranks of runs of DeepSpeed 0.19.8 held them."""
    assert expert_partitions(4, 2, {}) == [[0, 2], [1, 3]]
    assert expert_partitions(4, 1, {}) == [[0], [1], [2], [3]]
    assert expert_partitions(3, 3, {}) == [[0, 1, 2]]
    assert expert_partitions(4, 2, {"use_data_before_expert_parallelism": True}) == [[0, 1], [2, 3]]


def test_partitions_that_ranks_cannot_hold_are_refused() -> None:
    for partitions in (0, 3, 8):
        with pytest.raises(FormatError, match=f"{partitions} partitions"):
            expert_partitions(4, partitions, {})


def test_local_experts_get_their_numbers_in_the_layer() -> None:
    other = MOE.replace("layers.0", "layers.1")
    local = [f"{MOE}.0.up.weight", f"{MOE}.1.up.weight", f"{other}.0.up.weight", "model.norm.weight"]
    assert list(global_names(local, 3).values()) == [
        f"{MOE}.6.up.weight",
        f"{MOE}.7.up.weight",
        f"{other}.3.up.weight",
        "model.norm.weight",
    ]
    assert is_expert(local[0])
    assert not is_expert("model.layers.0.mlp.deepspeed_moe.gate.wg.weight")


def test_missing_files_of_experts_are_named() -> None:
    """zero_to_fp32 and others fail on, or leave out, what these files hold."""
    found = [(0, 0), (0, 2), (1, 0), (1, 1)]
    (problem,) = check_files(found, [3, 2], 0)
    assert problem.message == ("1 of 5 files of experts is missing: no layer_0_expert_1_mp_rank_00_model_states.pt")
    (problem,) = check_files([], [2], 3)
    assert (
        "no layer_0_expert_0_mp_rank_03_model_states.pt, layer_0_expert_1_mp_rank_03_model_states.pt" in problem.message
    )
    assert not list(check_files([(0, 0), (0, 1)], [2], 0))


def test_without_a_recorded_number_the_files_count() -> None:
    (problem,) = check_files([(0, 0), (0, 3)], None, 0)
    assert "2 of 4 files" in problem.message


def test_names_of_old_releases_have_no_layer() -> None:
    assert not list(check_files([(None, 0), (None, 1)], [2, 2], 0))
    (problem,) = check_files([(None, 1)], [2, 2], 0)
    assert "no expert_0_mp_rank_00_model_states.pt" in problem.message


def test_numbers_of_experts_are_bounded() -> None:
    for recorded in ([1 << 60], [1 << 15] * 3):
        with pytest.raises(FormatError, match="more than any model"):
            list(check_files([], recorded, 0))
    with pytest.raises(FormatError, match="more than any model"):
        list(check_files([(1 << 60, 0), (0, 1 << 60)], None, 0))
    with pytest.raises(FormatError, match="more than any model"):
        list(check_files([(1 << 60, 0)], None, 0))


def test_masters_of_other_experts_than_the_files_are_refused() -> None:
    stored = {f"{MOE}.0.up.weight", f"{MOE}.1.up.weight"}
    assert not list(check_masters(stored, stored))
    (problem,) = check_masters([f"{MOE}.5.up.weight"], stored)
    assert f"`{MOE}.5.up.weight`" in problem.message
    assert "--weights model" in (problem.hint or "")


def test_files_are_merged_and_what_two_hold_is_said(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    states = [shelf.put_all({f"{MOE}.{expert}.up.weight": numbers(2)}) for expert in (0, 1)]
    merged, problems = merge_files(states)
    assert set(merged) == {f"{MOE}.0.up.weight", f"{MOE}.1.up.weight"}
    assert not problems
    _, (problem,) = merge_files([states[0], states[0]])
    assert f"`{MOE}.0.up.weight`" in problem.message
