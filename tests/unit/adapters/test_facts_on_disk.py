"""Where the facts of an adapter are looked for, beside and inside a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unshard.errors import UnshardError
from unshard.formats.surroundings import read_adapter_facts

FULL = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": True}


def write(place: Path, facts: object) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(facts))


@pytest.mark.parametrize(
    "name", ["adapter_config.json", "huggingface/adapter_config.json", "lora_adapter/adapter_config.json"]
)
def test_the_fuller_file_goes_first(tmp_path: Path, name: str) -> None:
    write(tmp_path / "lora_train_meta.json", {"r": 4, "lora_alpha": 16, "task_type": "CAUSAL_LM"})
    write(tmp_path / name, FULL)
    assert read_adapter_facts([tmp_path], []) == FULL | {"task_type": "CAUSAL_LM"}


def test_an_alpha_of_zero_is_looked_for_elsewhere(tmp_path: Path) -> None:
    write(tmp_path / "lora_train_meta.json", {"r": 4, "lora_alpha": 16})
    write(tmp_path / "lora_adapter" / "adapter_config.json", FULL | {"lora_alpha": 0})
    assert read_adapter_facts([tmp_path], []) == FULL | {"lora_alpha": 16}


def test_nothing_lies_there(tmp_path: Path) -> None:
    assert read_adapter_facts([tmp_path], []) is None


def test_malformed_facts_are_a_problem(tmp_path: Path) -> None:
    (tmp_path / "lora_train_meta.json").write_text("{")
    problems: list[UnshardError] = []
    assert read_adapter_facts([tmp_path], problems) is None
    assert "lora_train_meta.json" in str(problems[0])
