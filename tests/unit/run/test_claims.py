"""Claims: equal bytes, however they lie, and a difference that is found wherever it is."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from running import ROOT, literal_file, write_array
from unshard.errors import IncompleteError, ModelError
from unshard.plan.moves import Plan
from unshard.report.events import Advanced, Event, PhaseStarted, ignore
from unshard.run.claims import check_claims
from unshard.run.local import run_plan
from unshard.settings import Settings
from unshard.target import Claim
from unshard.tensors import Tensor, concat

SETTINGS = Settings(jobs=2, buffer=512)
VALUES = np.random.default_rng(0).standard_normal((50, 30)).astype(np.float32)


def claims_of(directory: Path, *pairs: tuple[Tensor, Tensor]) -> Plan:
    claims = [Claim(left, right, f"{left.name} is not {right.name}", hint="look") for left, right in pairs]
    return Plan({ROOT: directory}, (literal_file("m", b"x", last=True),), tuple(claims))


def test_equal_bytes_that_lie_differently(tmp_path: Path) -> None:
    whole = write_array(tmp_path, "whole", VALUES, padding=3)
    halves = [write_array(tmp_path, "left", VALUES[:, :7].copy()), write_array(tmp_path, "right", VALUES[:, 7:].copy())]
    turned = write_array(tmp_path, "turned", VALUES.T.copy()).transpose()
    pairs = [(whole, concat(halves, 1)), (turned, whole), (whole.reshape((25, 60)), turned.reshape((25, 60)))]
    assert check_claims(claims_of(tmp_path, *pairs), SETTINGS, ignore) == []


@pytest.mark.parametrize("place", [0, 777, 1499])
def test_a_difference_is_found_and_located(tmp_path: Path, place: int) -> None:
    other = VALUES.copy()
    other.reshape(-1)[place] += 1
    pair = write_array(tmp_path, "a", VALUES), write_array(tmp_path, "b", other)
    (problem,) = check_claims(claims_of(tmp_path, pair), SETTINGS, ignore)
    assert problem.message == f"a is not b (a difference at element {[place // 30, place % 30]})"
    assert problem.hint == "look"


def test_bits_are_compared_not_values(tmp_path: Path) -> None:
    special = np.array([np.nan, 0.0, np.inf], np.float32)
    same = write_array(tmp_path, "a", special), write_array(tmp_path, "b", special)
    signed = write_array(tmp_path, "c", special), write_array(tmp_path, "d", np.array([np.nan, -0.0, np.inf], "f4"))
    assert [str(e) for e in check_claims(claims_of(tmp_path, same, signed), SETTINGS, ignore)] == [
        "c is not d (a difference at element [1])\n\nhint: look"
    ]


def test_all_claims_are_checked_and_told_in_order(tmp_path: Path) -> None:
    tensors = [write_array(tmp_path, f"t{number}", VALUES + number) for number in range(6)]
    pairs = list(pairwise(tensors))
    problems = check_claims(claims_of(tmp_path, *pairs), SETTINGS, ignore)
    assert [problem.message.split(" (")[0] for problem in problems] == [f"t{n} is not t{n + 1}" for n in range(5)]


def test_the_kind_of_error_tells_replicas_from_ties(tmp_path: Path) -> None:
    a, b = write_array(tmp_path, "a", VALUES), write_array(tmp_path, "b", VALUES + 1)
    replica, tie = check_claims(claims_of(tmp_path, (a, b.rename("a")), (a, b)), SETTINGS, ignore)
    assert isinstance(replica, IncompleteError)
    assert isinstance(tie, ModelError)


def test_shapes_and_dtypes_that_differ(tmp_path: Path) -> None:
    a, b = write_array(tmp_path, "a", VALUES), write_array(tmp_path, "b", VALUES.astype(np.float16))
    problems = check_claims(claims_of(tmp_path, (a, b), (a, a.reshape((1500,)))), SETTINGS, ignore)
    assert [problem.message for problem in problems] == [
        "a is not b (they differ in shape or dtype)",
        "a is not a (they differ in shape or dtype)",
    ]


def test_one_place_equals_itself_without_a_look(tmp_path: Path) -> None:
    tensor = write_array(tmp_path, "a", VALUES)
    (tmp_path / "a").unlink()
    events: list[Event] = []
    replica = replace(tensor, name="b", chunks=tuple([replace(chunk, rank=3) for chunk in tensor.chunks]))
    assert check_claims(claims_of(tmp_path, (tensor, replica)), SETTINGS, events.append) == []
    assert events == []


def test_progress_counts_one_side(tmp_path: Path) -> None:
    events: list[Event] = []
    pair = write_array(tmp_path, "a", VALUES), write_array(tmp_path, "b", VALUES)
    check_claims(claims_of(tmp_path, pair), SETTINGS, events.append)
    assert events[0] == PhaseStarted("claims", VALUES.nbytes)
    assert sum(event.size for event in events if isinstance(event, Advanced)) == VALUES.nbytes


def test_nothing_is_written_when_a_claim_fails(tmp_path: Path) -> None:
    pair = write_array(tmp_path, "a", VALUES), write_array(tmp_path, "b", VALUES + 1)
    with pytest.raises(ModelError, match="a is not b"):
        run_plan(claims_of(tmp_path, pair), tmp_path / "out", SETTINGS, ignore)
    assert not (tmp_path / "out").exists()
