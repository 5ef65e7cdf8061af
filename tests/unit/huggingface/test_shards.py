"""Which tensor goes into which file."""

from __future__ import annotations

import pytest

from unshard.errors import ModelError
from unshard.formats.huggingface.shards import BIN, SAFETENSORS, assign_files, follow_layout, split_by_size


def test_groups_are_filled_in_order_and_giants_stand_alone() -> None:
    sizes = {"a": 6, "giant": 11, "b": 4, "c": 1, "d": 0}
    assert split_by_size(sizes, 10) == [["giant"], ["a", "b"], ["c", "d"]]
    assert split_by_size({}, 10) == []


def test_files_are_numbered_only_where_there_are_several() -> None:
    assert assign_files({"a": 5, "b": 5}, 10, SAFETENSORS) == {"model.safetensors": ["a", "b"]}
    assert list(assign_files({"a": 5, "b": 6}, 10, BIN)) == [
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model-00002-of-00002.bin",
    ]


def test_a_reference_layout_is_followed() -> None:
    names = dict.fromkeys("abc")
    layout = {"c": "one.safetensors", "a": "two.safetensors", "b": "one.safetensors", "gone": "three.safetensors"}
    assert follow_layout(names, layout, SAFETENSORS) == {"one.safetensors": ["b", "c"], "two.safetensors": ["a"]}
    assert follow_layout(names, layout, BIN) == {
        "pytorch_model-00001-of-00002.bin": ["b", "c"],
        "pytorch_model-00002-of-00002.bin": ["a"],
    }
    assert follow_layout(names, dict.fromkeys("abc", "odd.safetensors"), SAFETENSORS) == {
        "model.safetensors": ["a", "b", "c"]
    }
    with pytest.raises(ModelError, match="1 tensors lie in no file of the reference model: d"):
        follow_layout({"d": None}, layout, SAFETENSORS)
