"""PEFT's patterns: short ones are written only where they say the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unshard.adapters.patterns import is_end, last_component, patterns_for, shortest_targets, value_for

COMPONENTS = st.sampled_from(["model", "layers", "0", "1", "10", "q_proj", "v_proj", "experts"])
PATHS = st.lists(COMPONENTS, min_size=1, max_size=5).map(".".join)


@given(st.dictionaries(PATHS, st.integers(1, 3)), st.integers(1, 3))
def test_patterns_give_each_path_its_value(values: dict[str, int], default: int) -> None:
    patterns = patterns_for(values, default)
    assert {path: value_for(patterns, path, default) for path in values} == values


@given(st.sets(PATHS, min_size=1), st.sets(PATHS))
def test_targets_mean_exactly_the_targets(targets: set[str], others: set[str]) -> None:
    """By PEFT's rule: a name targets the modules that end in it. Whole paths may be the end of a longer one."""
    modules = targets | others
    stated = shortest_targets(targets, modules)
    assert all(any(is_end(name, target) for name in stated) for target in targets)
    short = [name for name in stated if name == last_component(name) and name not in targets]
    assert not any(is_end(name, module) for name in short for module in modules - targets)


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("q_proj", "layers.0.q_proj", True),
        ("q_proj", "layers.0.wq_proj", False),
        ("layers.1.q_proj", "model.layers.1.q_proj", True),
        ("layers.1.q_proj", "model.layers.11.q_proj", False),
        ("^layers.1.q_proj", "model.layers.1.q_proj", False),
        (r"layers\.(0|2)\..*_proj", "model.layers.2.self_attn.q_proj", True),
        (r"layers\.(0|2)\..*_proj", "model.layers.1.self_attn.q_proj", False),
    ],
)
def test_patterns_match_as_in_peft(pattern: str, path: str, matches: bool) -> None:
    assert value_for({pattern: 2}, path, 1) == (2 if matches else 1)


def test_the_first_match_counts() -> None:
    assert value_for({"layers.0.q": 3, "q": 2}, "layers.0.q", 1) == 3
    assert value_for({"q": 2, "layers.0.q": 3}, "layers.0.q", 1) == 2
