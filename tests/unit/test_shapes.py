"""Shapes and their order for flat parameters: who may be believed, and who may not."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from outlines import SIZES
from unshard.checkpoint import Checkpoint
from unshard.dtypes import BF16
from unshard.families import expected_file_shapes, expected_shapes
from unshard.shapes import ShapeTeller
from unshard.tensors import SourceFile, Tensor, contiguous_chunk

DENSE = {"model_type": "llama", **SIZES}
EXPERTS = {"model_type": "qwen3_moe", "head_dim": 4, "num_experts": 3, "moe_intermediate_size": 5, **SIZES}
VISION = {
    "model_type": "qwen2_vl",
    "text_config": SIZES,
    "vision_config": {"depth": 1, "embed_dim": 4, "hidden_size": 8, "mlp_ratio": 2, "patch_size": 2},
}
OLD, NEW = {"transformers_version": "4.57.1"}, {"transformers_version": "5.0.0"}


def of(config: dict[str, Any], *, in_file: bool = False) -> dict[str, tuple[int, ...]]:
    found = expected_file_shapes(config) if in_file else expected_shapes(config)
    assert found is not None
    return dict(found)


def reference(
    shapes: Mapping[str, tuple[int, ...]],
    config: dict[str, Any] | None,
    file: str,
    tied: Mapping[str, str] | None = None,
) -> Checkpoint:
    """A model in one file, in this order; `tied` names are the same bytes as others."""
    places = {name: number * 4096 for number, name in enumerate(shapes)}
    places |= {name: places[other] for name, other in (tied or {}).items()}
    tensors = {
        name: Tensor(name, BF16, shape, (contiguous_chunk(SourceFile("source", file), places[name], shape, BF16),))
        for name, shape in shapes.items()
    }
    return Checkpoint("huggingface", "a reference", {"source": Path("/reference")}, tensors, config)


def alphabetical(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return dict(sorted(shapes.items()))


@pytest.mark.parametrize("config", [DENSE, VISION], ids=["dense", "vision"])
def test_a_family_tells_the_order_of_a_reference(config: dict[str, Any]) -> None:
    teller = ShapeTeller(reference(alphabetical(of(config, in_file=True)), config, "model.safetensors"))
    assert list(teller(None) or ()) == list(of(config))
    assert teller.unordered is None


@pytest.mark.parametrize("version", [OLD, NEW], ids=["old", "new"])
def test_a_reference_does_not_tell_how_experts_lay(version: dict[str, str]) -> None:
    """Under transformers 4 they lay one by one; the hub's file looks the same whatever version trained."""
    config = EXPERTS | version
    teller = ShapeTeller(reference(alphabetical(of(config, in_file=True)), config, "model.safetensors"))
    assert teller.unordered is teller.reference


def test_names_in_alphabetical_order_tell_nothing_whatever_the_file() -> None:
    """A pytorch_model.bin that was made of safetensors."""
    shapes = of(DENSE)
    saved = ShapeTeller(reference(shapes, None, "pytorch_model.bin"))
    assert (list(saved(None) or ()), saved.unordered) == (list(shapes), None)
    for file in ("pytorch_model.bin", "model.safetensors"):
        teller = ShapeTeller(reference(alphabetical(shapes), None, file))
        assert teller.unordered is teller.reference


def test_tied_names_of_one_storage_count_once() -> None:
    shapes = of(DENSE)
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    teller = ShapeTeller(reference(shapes, None, "pytorch_model.bin", tied))
    assert list(teller(None) or ()) == [name for name in shapes if name != "lm_head.weight"]


def test_the_runs_own_config_goes_before_a_given_one() -> None:
    teller = ShapeTeller(given=EXPERTS | OLD)
    assert teller(EXPERTS | NEW) == of(EXPERTS | NEW)
    assert teller.notes == []


def test_a_given_config_is_believed_with_a_warning_where_versions_differ() -> None:
    teller = ShapeTeller(given=EXPERTS | OLD)
    assert teller(None) == of(EXPERTS | OLD)
    (note,) = teller.notes
    assert note.level == "warning"
    assert "taken to be 4.57.1" in note.text
    silent = ShapeTeller(given=DENSE | OLD)
    assert (silent({"model_type": "novel"}), silent.notes) == (of(DENSE), [])


def test_nothing_is_known_of_unknown_families() -> None:
    assert ShapeTeller()(None) is None
    assert ShapeTeller(given={"model_type": "novel"})({"model_type": "novel"}) is None


# By names -------------------------------------------------------------------------------------------------------------


def by_names(
    config: dict[str, Any] | None, names: Collection[str], **options: Any
) -> dict[str, tuple[int, ...]] | None:
    found = ShapeTeller(**options).by_names(config, names)
    return None if found is None else dict(found)


@pytest.mark.parametrize("version", [OLD, NEW], ids=["old", "new"])
@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("config", [DENSE, EXPERTS, VISION], ids=["dense", "experts", "vision"])
def test_names_of_the_running_model_and_of_its_file_are_known(
    config: dict[str, Any], version: dict[str, str], in_file: bool
) -> None:
    shapes = of(config | version, in_file=in_file)
    assert by_names(config | version, shapes) == shapes
    assert by_names(None, shapes, given=config | version) == shapes


@pytest.mark.parametrize(
    "wrapped",
    ["{}", "module.{}", "_orig_mod.{}", "model.{}", "base_model.model.{}", "module._fsdp_wrapped_module.{}"],
)
def test_wrappers_do_not_count(wrapped: str) -> None:
    shapes = {wrapped.format(name): shape for name, shape in of(DENSE).items()}
    assert by_names(DENSE, shapes) == shapes


def test_base_layers_of_adapters_are_known_and_adapters_are_not() -> None:
    query = "model.layers.0.self_attn.q_proj"
    stored = {f"base_model.model.{name}": shape for name, shape in of(DENSE).items() if query not in name}
    stored[f"base_model.model.{query}.base_layer.weight"] = of(DENSE)[f"{query}.weight"]
    assert by_names(DENSE, [*stored, f"base_model.model.{query}.lora_A.default.weight"]) == stored


def test_a_tied_head_is_known_where_it_is_stored_and_not_missed_where_it_is_not() -> None:
    config = {**DENSE, "tie_word_embeddings": True}
    shapes = of(config)
    assert by_names(config, shapes) == shapes
    head = {"lm_head.weight": shapes["model.embed_tokens.weight"]}
    assert by_names(config, shapes | head) == shapes | head


def test_parameters_that_are_not_stored_have_names_of_their_own() -> None:
    shapes = of(DENSE)
    stored = list(shapes)[:-1]
    assert by_names(DENSE, stored) == shapes


def test_a_reference_goes_first() -> None:
    shapes = of(DENSE) | {"own.weight": (3,)}
    teller = {"reference": reference(shapes, DENSE, "model.safetensors"), "given": VISION}
    assert by_names(VISION, shapes, **teller) == shapes
    unknown = {"x.weight": (2, 3)}
    assert by_names(None, unknown, reference=reference(unknown, None, "model.safetensors")) == unknown


def test_the_family_of_a_reference_tells_names_that_it_does_not_have() -> None:
    """The hub's file has experts one by one, the running model of transformers 5 has them packed."""
    config = EXPERTS | NEW
    model = reference(of(config, in_file=True), config, "model.safetensors")
    assert by_names(None, of(config), reference=model) == of(config)


@pytest.mark.parametrize("config", [None, {"model_type": "unheard_of"}, {"model_type": "llama"}], ids=str)
def test_where_nothing_tells_shapes_there_are_none(config: dict[str, Any] | None) -> None:
    assert by_names(config, of(DENSE)) is None


def test_names_of_another_model_are_not_known() -> None:
    assert by_names(DENSE, ["encoder.block.weight"]) is None
