"""config.json: byte for byte, but for what no longer holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unshard.dtypes import BF16, BOOL, F8_E4M3, F16, F32, I64, U8, DType
from unshard.errors import FormatError
from unshard.formats.huggingface.config_file import adapt_config
from unshard.tensors import Tensor

PLACE = Path("config.json")


def adapt(config: dict[str, Any], *dtypes: tuple[DType, int], **changes: object) -> tuple[dict[str, Any], list[str]]:
    values = [Tensor(f"t{number}", dtype, (size,), ()) for number, (dtype, size) in enumerate(dtypes)]
    data, notes = adapt_config(json.dumps(config, indent=4).encode(), config, values, changes, PLACE)
    return json.loads(data), [note.text for note in notes]


def test_a_config_that_holds_keeps_every_byte() -> None:
    data = b'{ "torch_dtype" :"bfloat16",\r\n"x":1.0e0,"dtype":null }'
    values = [Tensor("a", BF16, (4,), ()), Tensor("b", F32, (1,), ()), Tensor("c", I64, (9,), ())]
    assert adapt_config(data, json.loads(data), values, {}, PLACE) == (data, ())


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_field_follows_the_weights(key: str) -> None:
    config, notes = adapt({"a": 1, key: "bfloat16"}, (F32, 4))
    assert config == {"a": 1, key: "float32"}
    assert notes == [f"config.json: {key} is float32, as the weights are; it said bfloat16"]


def test_the_dtype_of_most_bytes_decides() -> None:
    assert adapt({"dtype": "float32"}, (F32, 4), (BF16, 9))[0] == {"dtype": "bfloat16"}
    assert adapt({"dtype": "float32"}, (F32, 5), (BF16, 9))[0] == {"dtype": "float32"}


@pytest.mark.parametrize("said", ["auto", None, 3, "bfloat"])
def test_a_dtype_field_that_says_nothing_is_left(said: object) -> None:
    assert adapt({"dtype": said}, (F32, 4)) == ({"dtype": said}, [])


def test_the_old_spelling_is_kept() -> None:
    assert adapt({"torch_dtype": "torch.float16"}, (F32, 4))[0] == {"torch_dtype": "torch.float32"}


def test_the_parts_of_a_model_may_have_their_own_dtype() -> None:
    config = {"dtype": "float32", "text_config": {"dtype": "bfloat16"}, "vision_config": {"torch_dtype": "float32"}}
    assert adapt(config, (BF16, 9), (F32, 1))[0] == config | {"dtype": "bfloat16"}
    changed, notes = adapt(config, (F16, 9))
    assert changed == {
        "dtype": "float16",
        "text_config": {"dtype": "float16"},
        "vision_config": {"torch_dtype": "float16"},
    }
    assert len(notes) == 3


def test_a_quantization_config_goes_with_the_quantised_weights() -> None:
    config = {"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}, "z": 1}
    assert adapt(config, (BF16, 1), (F8_E4M3, 9)) == (config, [])
    assert adapt(config, (BF16, 1), (U8, 9)) == (config, [])
    changed, notes = adapt(config, (BF16, 1), (BOOL, 1), (I64, 1))
    assert changed == {"dtype": "bfloat16", "z": 1}
    assert notes == ["config.json: quantization_config was removed, as no tensor is quantised"]


def test_changes_of_the_model_are_made() -> None:
    config = {"a": 1, "text_config": {"tie_word_embeddings": True}, "b.c": 1}
    changed, notes = adapt(config, **{"text_config.tie_word_embeddings": False, "a": None, "b.c": 2, "new": [1]})
    assert changed == {"text_config": {"tie_word_embeddings": False}, "b.c": 2, "new": [1]}
    assert notes == []


def test_a_config_that_cannot_be_changed_is_refused() -> None:
    data = b'{"dtype": "float16", "dtype": "bfloat16"}'
    with pytest.raises(FormatError, match="dtype must change, but cannot: a name that appears twice"):
        adapt_config(data, json.loads(data), [Tensor("a", F32, (1,), ())], {}, PLACE)
