"""Files of rules of one's own: what they say, and all that can be wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from unshard.errors import UnshardError
from unshard.families import FAMILIES
from unshard.families.rules import Rule, find_rule
from unshard.families.steps import STEPS, OnPart, Permute, Sections, Unstack
from unshard.mapping import read_map

EXAMPLE = """
family = "qwen3"

[[rule]]
from = "decoder.layers.{layer}.mlp.gate.weight"
to = "model.layers.{layer}.mlp.gate.weight"

[[rule]]
from = "decoder.layers.{layer}.experts.weight"
to = ["model.layers.{layer}.{expert}.q.weight", "model.layers.{layer}.{expert}.k.weight"]
steps = [
  { do = "unstack", fan = "expert" },
  { do = "sections", rows = ["2*head_dim", 4], groups = "num_key_value_heads" },
  { do = "on_part", part = 0, step = { do = "permute", shape = ["2", "?"], order = [1, 0] } },
]

[axes]
"decoder.layers.{layer}.mlp.gate.weight" = 0
"decoder.layers.{layer}.mlp.scale" = "replicated"
"""


def write(directory: Path, text: str) -> Path:
    file = directory / "rules.toml"
    file.write_text(text)
    return file


def test_rules_come_before_those_of_the_named_family(tmp_path: Path) -> None:
    found = read_map(write(tmp_path, EXAMPLE))
    permute = Permute(("2", "?"), (1, 0))
    assert found.rules[:2] == (
        Rule("decoder.layers.{layer}.mlp.gate.weight", ("model.layers.{layer}.mlp.gate.weight",), own=True),
        Rule(
            "decoder.layers.{layer}.experts.weight",
            ("model.layers.{layer}.{expert}.q.weight", "model.layers.{layer}.{expert}.k.weight"),
            (Unstack("expert"), Sections(("2*head_dim", "4"), "num_key_value_heads"), OnPart(0, permute)),
            own=True,
        ),
    )
    assert found.rules[2:] == FAMILIES["qwen3"].megatron


def test_axes_are_patterns_of_whole_names(tmp_path: Path) -> None:
    import re

    axes = read_map(write(tmp_path, EXAMPLE)).axes
    named = {
        name: axis
        for name in ("decoder.layers.17.mlp.gate.weight", "decoder.layers.0.mlp.scale", "decoder.layers.0.mlp.scales")
        for pattern, axis in axes.items()
        if re.fullmatch(pattern, name)
    }
    assert named == {"decoder.layers.17.mlp.gate.weight": 0, "decoder.layers.0.mlp.scale": None}


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    wrong = """
    family = "gpt9"
    rules = 1
    [[rule]]
    from = "a.{layer}"
    to = "b.{expert}"
    [[rule]]
    from = "a"
    to = ["b", "c"]
    [[rule]]
    from = "a"
    to = "b"
    steps = [{ do = "turn" }]
    [[rule]]
    from = "a"
    to = "b"
    steps = [{ do = "permute", shape = ["2"], order = "10" }]
    [[rule]]
    from = "a"
    to = "b"
    steps = [{ do = "sections", group = "2" }]
    [[rule]]
    from = "a.{x}.{x}"
    to = "b"
    [axes]
    "a" = 7
    """
    with pytest.raises(UnshardError) as caught:
        read_map(write(tmp_path, wrong))
    text = str(caught.value)
    for said in (
        "the file: rules means nothing; known are axes, family, rule",
        "`family`: 'gpt9' is none of",
        "rule 1: the wildcards of `from` and `to` do not match: 'expert'",
        "rule 2: several names in `to` need a step that makes parts",
        "rule 3: a step says what to do: one of unstack, divide",
        "rule 4: `order` should be tuple[int, ...], but is '10'",
        "rule 5: group means nothing",
        "rule 6: the wildcards of `from` and `to` do not match",
        "[axes]: the axis of a is 0, 1 or 'replicated', not 7",
    ):
        assert said in text


@pytest.mark.parametrize("text", ["[[rule]", "a = 1\na = 2", "\x00"])
def test_malformed_toml_is_told_with_its_place(tmp_path: Path, text: str) -> None:
    with pytest.raises(UnshardError, match="malformed TOML"):
        read_map(write(tmp_path, text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UnshardError, match="no such file"):
        read_map(tmp_path / "rules.toml")


def test_every_step_has_a_name_and_the_name_is_that_of_its_class() -> None:
    import re

    for name, kind in STEPS.items():
        assert re.sub(r"(?<=[a-z])([A-Z])", r"_\1", kind.__name__).lower() == name


def test_own_rules_win_over_those_that_spell_out_more(tmp_path: Path) -> None:
    text = '[[rule]]\nfrom = "decoder.layers.{layer}.mlp.{rest}"\nto = "model.layers.{layer}.feed_forward.{rest}"'
    rules = (*read_map(write(tmp_path, text)).rules, *FAMILIES["llama"].megatron)
    found = find_rule("decoder.layers.3.mlp.linear_fc2.weight", rules)
    assert found is not None
    rule, wildcards = found
    assert rule.part_name((), wildcards) == "model.layers.3.feed_forward.linear_fc2.weight"
    other = find_rule("decoder.layers.3.self_attention.linear_proj.weight", rules)
    assert other is not None
    assert not other[0].own
