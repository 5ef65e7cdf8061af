"""Every example of the guide to `--map` is what it says: a file that is read, and steps that do what numpy does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference import Array, Disk, shard
from unshard.dtypes import F32
from unshard.families import FAMILIES
from unshard.families.rules import join, split
from unshard.families.sizes import Sizes
from unshard.families.steps import STEPS
from unshard.mapping import read_map
from unshard.run.functions import apply
from unshard.tensors import Box, Computed, Value

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "map.md").read_text()
_EXAMPLE = re.compile(
    r"^(?:### `(\w+)`|## (Several steps))\n(?:(?!^##).)*?```toml\n(.*?)```\n```python\n(.*?)```",
    re.MULTILINE | re.DOTALL,
)
"""Step or title, TOML, Python."""

SIZES = Sizes(
    {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6, "hidden_size": 24, "vocab_size": 43},
    facts={"apply_layernorm_1p": True},
)


def examples() -> list[Any]:
    return [pytest.param(step, toml, python, id=step or title) for step, title, toml, python in _EXAMPLE.findall(GUIDE)]


def random(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def values_of(value: Value, disk: Disk) -> Array:
    if not isinstance(value, Computed):
        return disk.assemble(value)
    return apply(value.function, [disk.assemble(tensor) for tensor in value.inputs], value.parameters)


def cut(array: Array) -> list[Box]:
    """Pieces as three ranks would have them: along the first axis, the last one shorter."""
    rows, rest = array.shape[0], array.shape[1:]
    step = -(-rows // 3)
    starts = range(0, rows, step)
    return [Box((start, *[0] * len(rest)), (min(step, rows - start), *rest)) for start in starts]


def test_every_step_has_an_example() -> None:
    assert sorted(step for step, *_ in _EXAMPLE.findall(GUIDE) if step) == sorted(STEPS)


@pytest.mark.parametrize(("step", "toml", "python"), examples())
def test_the_example_does_what_the_numpy_beside_it_does(step: str, toml: str, python: str, tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(toml)
    rules = read_map(file).rules
    assert not step or f'do = "{step}"' in toml
    scope: dict[str, Any] = {"np": np, "random": random}
    exec(python, scope)
    disk, name = Disk(), rules[0].whole.format(layer=0)
    stored = shard(disk, name, scope["x"], F32, cut(scope["x"]))
    found = split({name: stored}, rules, SIZES)
    assert not found.problems
    assert not found.unknown
    assert sorted(found.tensors) == sorted(scope["y"])
    for part, expected in scope["y"].items():
        np.testing.assert_array_equal(values_of(found.tensors[part], disk), expected, strict=True)
    if not any(isinstance(value, Computed) for value in found.tensors.values()) and step != "first_rows":
        back = join(found.tensors, rules, SIZES)
        np.testing.assert_array_equal(values_of(back.tensors[name], disk), scope["x"], strict=True)


def test_the_whole_file_at_the_top_is_read(tmp_path: Path) -> None:
    (text,) = re.findall(r"## The file\n\n```toml\n(.*?)```", GUIDE, re.DOTALL)
    file = tmp_path / "rules.toml"
    file.write_text(text)
    found = read_map(file)
    assert found.rules[2:] == FAMILIES["qwen3"].megatron
    assert list(found.axes.values()) == [0, None]
