"""Layers of a PipelineModule: which file is which layer of the model, and whose masters are whose."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shards import Shelf, numbers
from unshard.errors import FormatError, IncompleteError, UnshardError
from unshard.formats.deepspeed.megatron_args import read_args
from unshard.formats.deepspeed.pipeline import masters_of_layers, outline, read_layers
from unshard.formats.deepspeed.pipeline_names import name_layers

BLOCK = {"self_attn.q_proj.weight": (4, 4), "mlp.up_proj.weight": (8, 4), "input_layernorm.weight": (4,)}
MEGATRON = {"self_attention.query_key_value.weight": (12, 4), "input_layernorm.weight": (4,)}


def test_modules_of_transformers_get_the_models_names() -> None:
    layers = {0: {"weight": (9, 4)}, 1: BLOCK, 2: BLOCK, 3: {"weight": (4,)}, 4: {"weight": (9, 4)}}
    naming = name_layers(layers)
    assert naming.dialect == "huggingface"
    assert not naming.notes
    assert naming.names["0.weight"] == "model.embed_tokens.weight"
    assert naming.names["1.self_attn.q_proj.weight"] == "model.layers.0.self_attn.q_proj.weight"
    assert naming.names["2.input_layernorm.weight"] == "model.layers.1.input_layernorm.weight"
    assert naming.names["3.weight"] == "model.norm.weight"
    assert naming.names["4.weight"] == "lm_head.weight"


def test_functions_have_no_file_and_wrappers_stand_before_all_names() -> None:
    block = {f"layer.{name}": shape for name, shape in BLOCK.items()}
    layers = {
        1: {"embed_tokens.weight": (9, 4)},
        3: block,
        4: block,
        6: {"norm.weight": (4,), "lm_head.weight": (9, 4)},
    }
    names = name_layers(layers).names
    assert names["3.layer.mlp.up_proj.weight"] == "model.layers.0.mlp.up_proj.weight"
    assert names["4.layer.mlp.up_proj.weight"] == "model.layers.1.mlp.up_proj.weight"
    assert names["6.norm.weight"] == "model.norm.weight"
    assert names["6.lm_head.weight"] == "lm_head.weight"


def test_megatron_deepspeed_gets_megatrons_names() -> None:
    layers = {
        1: {"word_embeddings.weight": (9, 4), "position_embeddings.weight": (8, 4)},
        3: MEGATRON,
        4: MEGATRON,
        5: {"weight": (4,), "bias": (4,)},
        6: {"lm_head.weight": (9, 4)},
    }
    naming = name_layers(layers)
    assert naming.dialect == "megatron"
    assert set(naming.names.values()) == {
        "language_model.embedding.word_embeddings.weight",
        "language_model.embedding.position_embeddings.weight",
        *[f"language_model.encoder.layers.{layer}.{name}" for layer in (0, 1) for name in MEGATRON],
        "language_model.encoder.final_layernorm.weight",
        "language_model.encoder.final_layernorm.bias",
        "language_model.output_layer.weight",
    }


@pytest.mark.parametrize(
    ("layers", "unknown"),
    [
        ({0: {"weight": (4, 4)}, 1: {"weight": (4, 4)}}, ("0.weight", "1.weight")),
        ({0: {"weight": (9, 4)}, 1: BLOCK, 2: {"weight": (4, 4, 4)}}, ("2.weight",)),
        ({0: {"conv.weight": (9, 4)}, 1: BLOCK}, ("0.conv.weight",)),
        ({0: {"a.self_attn.x": (4,), "b.weight": (4,)}}, ("0.a.self_attn.x", "0.b.weight")),
    ],
)
def test_what_is_not_known_keeps_its_name_and_is_said(
    layers: dict[int, dict[str, tuple[int, ...]]], unknown: tuple[str, ...]
) -> None:
    naming = name_layers(layers)
    (note,) = naming.notes
    assert note.level == "warning"
    assert note.tensors == unknown
    assert all(naming.names[name] == name for name in unknown)


def test_a_block_that_is_missing_between_others_is_named() -> None:
    with pytest.raises(IncompleteError, match=r"no block in layer_03-\*"):
        name_layers({1: {"weight": (9, 4)}, 2: BLOCK, 4: BLOCK})


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def test_files_of_layers_are_read_per_tensor_rank(shelf: Shelf) -> None:
    states = {(layer, rank): shelf.put_all({"weight": numbers(2)}) for layer in (0, 2) for rank in (0, 1)}
    problems: list[UnshardError] = []
    parts = read_layers(states, ["0.weight", "2.weight", "tied_modules.embed.weight"], problems)
    assert not problems
    assert [list(part) for part in parts] == [["0.weight", "2.weight"]] * 2
    assert parts[1]["2.weight"].name == "2.weight"
    assert outline(parts[0]) == {0: {"weight": (2,)}, 2: {"weight": (2,)}}


def test_all_missing_files_of_layers_are_named(shelf: Shelf) -> None:
    states = {(0, 0): shelf.put_all({"weight": numbers(2)}), (0, 1): {}, (1, 1): {}}
    problems: list[UnshardError] = []
    read_layers(states, ["5.weight"], problems)
    (problem,) = problems
    assert "3 of 6 files of layers are missing" in problem.message
    for name in ("layer_01-model_00", "layer_05-model_00", "layer_05-model_01"):
        assert name in problem.message


def test_missing_files_have_the_names_of_the_others(shelf: Shelf) -> None:
    """Without an axis of tensor parallelism, no name has a rank of it."""
    problems: list[UnshardError] = []
    read_layers({(0, 0): shelf.put_all({"w": numbers(2)})}, ["0.w", "7.w"], problems, numbered=False)
    assert "no layer_07-model_states.pt" in problems[0].message


def test_names_cannot_claim_any_number_of_ranks() -> None:
    with pytest.raises(FormatError, match="more than any cluster"):
        read_layers({(0, 1 << 40): {}}, [], [])


def test_masters_of_stages_find_their_layers_and_shared_ones_are_replicas(shelf: Shelf) -> None:
    parts = [shelf.put_all({"1.embed.weight": numbers(4, 2), "3.weight": numbers(2), "4.weight": numbers(2)})] * 2
    shared = numbers(4, 2, start=9)
    stages = [
        {"tied_modules.e.embed.weight": shared, f"{layer}.weight": numbers(2, start=float(layer))} for layer in (3, 4)
    ]
    masters = [shelf.put_all(stage) for stage in stages for _ in range(2)]
    found = masters_of_layers(masters, parts)
    assert len(found) == 2
    for part in found:
        assert np.array_equal(shelf.array(part["1.embed.weight"]), shared)
        assert len(part["1.embed.weight"].chunks) == 2
        assert np.array_equal(shelf.array(part["3.weight"]), numbers(2, start=3))
        assert np.array_equal(shelf.array(part["4.weight"]), numbers(2, start=4))


def test_a_shared_module_belongs_to_every_layer_that_is_it(shelf: Shelf) -> None:
    parts = [shelf.put_all({"0.weight": numbers(4, 2), "1.norm": numbers(2), "2.weight": numbers(4, 2)})]
    masters = [shelf.put_all({"tied_modules.e.weight": numbers(4, 2), "1.norm": numbers(2)})]
    (found,) = masters_of_layers(masters, parts)
    assert set(found) == {"0.weight", "1.norm", "2.weight"}


def test_shared_modules_that_look_alike_are_refused(shelf: Shelf) -> None:
    parts = [shelf.put_all({"0.weight": numbers(4, 2), "2.weight": numbers(4, 2)})]
    masters = [shelf.put_all({"tied_modules.a.weight": numbers(4, 2), "tied_modules.b.weight": numbers(4, 2)})]
    with pytest.raises(FormatError, match="as `b` has") as caught:
        masters_of_layers(masters, parts)
    assert "--weights model" in (caught.value.hint or "")


def test_a_shared_module_without_a_file_of_its_layer_is_missing(shelf: Shelf) -> None:
    parts = [shelf.put_all({"1.norm": numbers(2), "2.norm": numbers(2)})]
    masters = [shelf.put_all({"tied_modules.e.weight": numbers(4, 2), "1.norm": numbers(2), "2.norm": numbers(2)})]
    with pytest.raises(
        IncompleteError, match=r"`e` with weight, which no file of a layer has.* of layers 1-2"
    ) as caught:
        masters_of_layers(masters, parts)
    assert "layer_*-model_states.pt" in (caught.value.hint or "")


def test_masters_that_are_not_the_layers_are_refused(shelf: Shelf) -> None:
    parts = [shelf.put_all({"0.weight": numbers(4)})]
    with pytest.raises(FormatError, match=r"0\.weight: \[3\] in the optimizer, \[4\] in its file"):
        masters_of_layers([shelf.put_all({"0.weight": numbers(3)})], parts)
    with pytest.raises(FormatError, match=r"7\.weight: \[4\] in the optimizer, no file"):
        masters_of_layers([shelf.put_all({"7.weight": numbers(4)})], parts)
    with pytest.raises(FormatError, match="no stages"):
        masters_of_layers([{}] * 3, [parts[0], parts[0]])


def test_arguments_of_megatron_deepspeed_are_told_in_megatrons_words() -> None:
    facts = read_args(
        {
            "normalization": "rmsnorm",
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "rope_theta": 500000,
            "num_experts": [1],
            "use_rotary_position_embeddings": True,
            "layernorm_epsilon": 1e-6,
        }
    )
    expected = {
        "normalization": "RMSNorm",
        "num_query_groups": 2,
        "group_query_attention": True,
        "rotary_base": 500000,
        "num_experts": None,
        "position_embedding_type": "rope",
        "norm_epsilon": 1e-6,
    }
    assert expected.items() <= facts.items()
    assert read_args({"num_attention_heads": 8, "num_key_value_heads": None})["num_query_groups"] == 8
    assert read_args(None) == {}
