"""Small files around Megatron's weights that claim very much: an error or nothing, quickly, and never a traceback."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unshard.dtypes import F32
from unshard.errors import UnshardError
from unshard.families import derive_config
from unshard.formats.megatron.distributed.zarr import read_zarr
from unshard.formats.megatron.facts import read_facts
from unshard.formats.megatron.nemo_context import ObjectGraph
from unshard.formats.megatron.ranks.layers import parse_layout, recorded_counts
from unshard.formats.megatron.sections import join_sections
from unshard.tensors import Tensor

SECONDS = 5.0


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < SECONDS


@pytest.mark.parametrize(
    ("shape", "chunks", "message"),
    [
        ([1 << 40], [1], "at most"),
        ([1 << 40, 0], [1, 1], "at most"),
        ([1 << 17], [1], r"131,072 of 131,072 chunks are missing"),
    ],
)
def test_a_grid_of_very_many_chunks(shape: list[int], chunks: list[int], message: str, tmp_path: Path) -> None:
    place = tmp_path / "decoder.layers.mlp.linear_fc1.weight"
    place.mkdir()
    array = {"zarr_format": 2, "shape": shape, "chunks": chunks, "dtype": "<f4", "order": "C", "compressor": None,
             "fill_value": None, "filters": None}  # fmt: skip
    (place / ".zarray").write_text(json.dumps(array))
    stored = read_zarr(tmp_path, "source", lambda _name: True)
    assert any(re.search(message, problem.message) for problem in stored.problems), stored.problems


def test_objects_of_nemo_that_share_others(tmp_path: Path) -> None:
    """Ten levels of lists of ten references each: 10 ** 10 values, were all of them followed."""
    reference = {"type": "ref", "key": "0"}
    objects = {
        str(level): {
            "type": {"module": "builtins", "name": "list"},
            "items": [["Index(index=0)", {"type": "ref", "key": str(level + 1)}]] * 10,
        }
        for level in range(10)
    }
    root = {"items": [["Attr(name='layers')", reference]]}
    members = ObjectGraph({"objects": objects, "root": root}).members()
    assert set(members) == {"layers"}


def test_integers_that_cannot_be_printed() -> None:
    assert read_facts({"num_layers": 1 << 20_000, "hidden_size": 64}) == {"hidden_size": 64}


@pytest.mark.parametrize("facts", [{"num_layers": 8}, {"num_layers": 8, "pipeline_model_parallel_layout": "t*999999|"}])
def test_pipelines_of_more_stages_than_ranks_exist(facts: dict[str, Any]) -> None:
    assert recorded_counts(facts, 1 << 30, 1 << 30) is None
    assert parse_layout(facts.get("pipeline_model_parallel_layout", "t*9999999|")) is None


def test_shards_that_stand_for_absent_ranks_keep_the_sections_apart() -> None:
    there, absent = (Tensor("fc1", F32, (rows, 3), ()) for rows in (4, 12))
    assert join_sections([there, absent], 0, (2, 2), (1, 3)).shape == (16, 3)
    with pytest.raises(ValueError, match="do not add up"):
        join_sections([there, absent], 0, (2, 2))


@pytest.mark.parametrize("wrong", ["ten thousand", True, [1], {"a": 1}])
@pytest.mark.parametrize("name", ["rotary_base", "norm_epsilon"])
def test_settings_that_make_no_sense(name: str, wrong: object) -> None:
    facts = {
        "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 4, "swiglu": True, "normalization": "RMSNorm",
        "norm_epsilon": 1e-5, "rotary_base": 10000, "max_position_embeddings": 64, "group_query_attention": True,
    }  # fmt: skip
    layer = "decoder.layers.0."
    shapes = {
        "embedding.word_embeddings.weight": (32, 16),
        "output_layer.weight": (32, 16),
        "decoder.final_layernorm.weight": (16,),
        f"{layer}input_layernorm.weight": (16,),
        f"{layer}pre_mlp_layernorm.weight": (16,),
        f"{layer}self_attention.linear_qkv.weight": (32, 16),
        f"{layer}self_attention.linear_proj.weight": (16, 16),
        f"{layer}mlp.linear_fc1.weight": (40, 16),
        f"{layer}mlp.linear_fc2.weight": (16, 20),
    }
    tensors = {key: Tensor(key, F32, shape, ()) for key, shape in shapes.items()}
    assert derive_config(facts, tensors).config is not None
    refused = derive_config({**facts, name: wrong}, tensors)
    assert refused.config is None
    assert any(name in missing for missing in refused.missing)


def test_numbers_to_the_base_of_sixty(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    from unshard.formats.yaml_text import read_yaml

    file = tmp_path / "run_config.yaml"
    file.write_text("model: 1" + ":59" * 100_000)
    with pytest.raises(UnshardError, match="malformed YAML"):
        read_yaml(file)
    file.write_text("model: 1:30")
    assert read_yaml(file) == {"model": 90}
