"""What the documentation says about families is what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

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


def example() -> Family:
    """The family that the guide writes down."""
    guide = (DOCS / "guides" / "add-a-family.md").read_text()
    assert len(guide.splitlines()) < 100
    block = next(block for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "FAMILY = " in block)
    scope: dict[str, Any] = {}
    exec(block, scope)
    family = scope["FAMILY"]
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
