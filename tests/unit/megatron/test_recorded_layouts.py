"""What training recorded of how weights lie, where no shape tells: refused, or left to the user's own rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import unshard
from megatron_bytes import Decoder, write_legacy
from unshard.errors import ModelError
from unshard.families.megatron.contradictions import other_layouts
from unshard.report.report import Report

OWN_RULES = """
[[rule]]
from = "decoder.layers.{layer}.gate.weight"
to = "model.layers.{layer}.gate.weight"
"""


def merge(place: Path, args: dict[str, Any], **options: Any) -> Report:
    source = write_legacy(place / "run", Decoder(), tp=2, args=args)
    return unshard.merge(source, place / "out", config=source / "hf", **options)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"rotary_interleaved": True}, "rotary_interleaved: rows of queries and keys are turned in pairs"),
        ({"moe_mlp_glu_interleave_size": 32}, "gates and ups of experts lie in alternating blocks"),
        ({"moe_shared_expert_glu_interleave_size": 32}, "gates and ups of shared experts lie in alternating blocks"),
    ],
)
def test_layouts_that_no_family_takes_apart_are_refused(args: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="training recorded layouts that the model does not have") as caught:
        merge(tmp_path, args)
    assert message in caught.value.message
    assert "--map FILE" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()


def test_layouts_are_left_to_rules_of_ones_own(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(OWN_RULES)
    notes = merge(tmp_path, {"rotary_interleaved": True}, map=rules).notes
    assert [note.level for note in notes if "rotary_interleaved" in note.text] == ["warning"]


def test_layouts_that_are_the_usual_ones_are_not_refused(tmp_path: Path) -> None:
    usual = {"rotary_interleaved": False, "moe_mlp_glu_interleave_size": None}
    assert not [note for note in merge(tmp_path, usual).notes if "recorded layouts" in note.text]


def test_glm_4_turns_neighbours_in_transformers_too() -> None:
    assert other_layouts({"rotary_interleaved": True}, "glm4") is None
    assert other_layouts({"rotary_interleaved": True}, "glm4_moe") is not None


@pytest.mark.parametrize(("divisor", "level"), [(128, "note"), (14, "note"), (13, "warning"), (None, "note")])
def test_more_padding_than_training_adds_is_warned_of(divisor: int | None, level: str, tmp_path: Path) -> None:
    """A config.json of a smaller vocabulary must not cut trained rows unheard: 38 rows of 64 are kept on two ranks."""
    source = write_legacy(
        tmp_path / "run", Decoder(vocabulary=64), tp=2, args={"make_vocab_size_divisible_by": divisor}
    )
    config = source / "hf" / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 64', '"vocab_size": 38'))
    notes = unshard.merge(source, tmp_path / "out").notes
    found = [note for note in notes if note.text.startswith("26 rows of padding cut from the vocabulary")]
    assert [note.level for note in found] == [level] * 2
    assert ("Is vocab_size in config.json that of this model?" in found[0].text) == (level == "warning")
