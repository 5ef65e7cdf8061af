"""What the documentation says about families is what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import unshard.families
from unshard.families import FAMILIES
from unshard.families.architecture import read_architecture
from unshard.families.template import Family
from unshard.families.transformers5 import RENAMES

DOCS = Path(__file__).parents[2] / "docs"


def test_the_tables_name_all_families_and_all_renames_and_nothing_else() -> None:
    text = (DOCS / "reference" / "families.md").read_text()
    described = re.findall(r"^\| `(\w+)`", text.split("\n## ")[0], re.MULTILINE)
    assert sorted(described) == sorted(["model_type", *FAMILIES])
    section = text.split("\n## Renamed")[1].split("\n## ")[0]
    renamed = [name for name in re.findall(r"`(\w+)`", section) if name != "model_type"]
    assert sorted(renamed) == sorted(RENAMES)


def code_with(marker: str) -> dict[str, Any]:
    """What the guide's block of Python with this text in it defines."""
    guide = (DOCS / "guides" / "add-a-family.md").read_text()
    assert len(guide.splitlines()) < 100
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if marker in block]
    scope: dict[str, Any] = {}
    exec(block, scope)
    return scope


def example() -> Family:
    """The family that the guide writes down."""
    family = code_with("FAMILY = ")["FAMILY"]
    assert isinstance(family, Family)
    return family


@pytest.mark.torch
@pytest.mark.parametrize("settings", [{}, {"attention_bias": True}, {"num_key_value_heads": 1}])
@pytest.mark.parametrize("ending", ["ForCausalLM", "ForSequenceClassification"])
def test_the_example_of_the_guide_describes_its_model(ending: str, settings: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.Olmo2Config(
        hidden_size=24, num_attention_heads=4, intermediate_size=20, num_hidden_layers=2, vocab_size=11, **settings
    )
    with torch.device("meta"):
        model = getattr(transformers, f"Olmo2{ending}")(config)
    stored = {**config.to_dict(), "architectures": [f"Olmo2{ending}"]}
    architecture = read_architecture(stored, {"olmo2": example()})
    assert architecture is not None
    expected = architecture.base_shapes() | architecture.head_shapes(tied=False)
    assert list(expected.items()) == [(name, tuple(value.shape)) for name, value in model.named_parameters()]


@pytest.mark.torch
@pytest.mark.parametrize("layout", [{"tp": 2, "pp": 2}, {"write": "torch_dist", "tp": 2}, {"te": False}])
@pytest.mark.parametrize("settings", [{}, {"attention_bias": True}, {"num_key_value_heads": 4}])
def test_the_example_of_the_guide_comes_from_megatron(
    settings: dict[str, Any], layout: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    from megatron.checking import merge_and_compare, random_model

    monkeypatch.setattr(unshard.families, "FAMILIES", {**FAMILIES, "olmo2": example()})
    config = transformers.Olmo2Config(
        hidden_size=32, num_attention_heads=8, intermediate_size=22, num_hidden_layers=2, vocab_size=43,
        pad_token_id=None, bos_token_id=None, eos_token_id=None, **settings,
    )  # fmt: skip
    layout = {**layout, "args": {"kv_channels": 4}, "padded_vocab_size": 48}
    dims = {"q_layernorm.weight": 0, "k_layernorm.weight": 0}
    to_megatron = code_with("def to_megatron(")["to_megatron"]
    merge_and_compare(random_model(config), to_megatron, tmp_path, dims=dims, **layout)


def test_the_families_that_come_from_torchtitan_are_named() -> None:
    text = (DOCS / "reference" / "families.md").read_text()
    (listed,) = re.findall(r"^From \[torchtitan's own names\]\(.*?\): (.*?)\.\n", text, re.DOTALL | re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", listed)) == sorted(
        [name for name, family in FAMILIES.items() if family.torchtitan]
    )
