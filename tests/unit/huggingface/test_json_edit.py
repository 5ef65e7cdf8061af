"""One member changes, all other bytes stay."""

from __future__ import annotations

import json

import pytest

from unshard.formats.huggingface.json_edit import remove_member, set_member

TEXT = """{
    "b" : 1.50e3 ,
  "text_config": {"dtype": "bfloat16"},
\t"a": [Infinity, "x,}"],
    "u": "\\u00e9é"
}
"""


def test_a_value_is_replaced_where_it_lies() -> None:
    assert set_member(TEXT, ["b"], None) == TEXT.replace("1.50e3", "null")
    changed = set_member(TEXT, ["text_config", "dtype"], "float32")
    assert changed == TEXT.replace('"bfloat16"', '"float32"')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", '{"n": false}'),
        ('{"a": 1}', '{"a": 1,"n": false}'),
        ('{"a": 1, "b": 2}', '{"a": 1, "b": 2, "n": false}'),
        ('{\n  "a": 1\n}\n', '{\n  "a": 1,\n  "n": false\n}\n'),
        ('{\n  "a": 1,\n  "b": {}\n}\n', '{\n  "a": 1,\n  "b": {},\n  "n": false\n}\n'),
    ],
)
def test_a_new_member_goes_to_the_end_in_the_same_style(text: str, expected: str) -> None:
    assert set_member(text, ["n"], False) == expected


@pytest.mark.parametrize("name", ["b", "text_config", "a", "u"])
def test_a_removed_member_leaves_the_others_as_they_were(name: str) -> None:
    removed = remove_member(TEXT, [name])
    left = json.loads(TEXT)
    del left[name]
    assert json.loads(removed) == left
    lines = [line.strip(" ,\t") for line in TEXT.splitlines()]
    assert [line.strip(" ,\t") for line in removed.splitlines()] == [line for line in lines if f'"{name}"' not in line]


def test_the_only_member_and_none_at_all() -> None:
    assert remove_member('{"a": {"b": 1}}', ["a", "b"]) == '{"a": {}}'
    assert remove_member(TEXT, ["c"]) == TEXT


def test_what_is_ambiguous_or_absent_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        set_member('{"a": 1, "a": 2}', ["a"], 3)
    with pytest.raises(ValueError, match="no member"):
        set_member(TEXT, ["vision_config", "dtype"], "float32")
    with pytest.raises(ValueError, match=r"expected '\{'"):
        set_member(TEXT, ["a", "dtype"], "float32")
