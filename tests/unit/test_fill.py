"""`--fill-from`: what a checkpoint was saved without comes from a base model, and nothing else does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unshard
from fsdp_bytes import Array, numbers, world, write_json, write_ranks
from golden.tensor_files import assert_equal, assert_fused, read_tensors
from golden_set import COMMITTED
from hf_shard_bytes import write_file
from outlines import MOE, QWEN2, TIED, VISION
from unshard.checkpoint import Checkpoint
from unshard.dtypes import F32
from unshard.errors import IncompleteError, ModelError, UnshardError, UsageError
from unshard.families import expected_file_shapes, expected_shapes, name_model
from unshard.model import Base
from unshard.options import MergeOptions
from unshard.report.report import Report
from unshard.tensors import Tensor

TOY: dict[str, Any] = {"model_type": "toy", "architectures": ["ToyForCausalLM"], "vocab_size": 7}
TOY_SHAPES = {"embed.weight": (7, 4), "block.0.weight": (4, 4), "block.1.weight": (4, 4)}


def shapes_of(config: Mapping[str, Any], *, in_file: bool) -> Mapping[str, tuple[int, ...]]:
    found = expected_file_shapes(config) if in_file else expected_shapes(config)
    return found or TOY_SHAPES


def write_checkpoint(
    place: Path, config: dict[str, Any], without: Collection[str], rename: Callable[[str], str] = str
) -> Path:
    """Two FSDP ranks of the running model, but for some parameters."""
    shapes = shapes_of(config, in_file=False)
    assert set(without) <= shapes.keys()
    arrays = {rename(name): numbers(*shape, start=1000) for name, shape in shapes.items() if name not in without}
    return write_ranks(place, world(2), arrays, **config)


def write_base(
    place: Path, config: dict[str, Any], without: Collection[str] = (), *, dtype: str = "F32", **changed: Array
) -> Path:
    """A Hugging Face model of other values."""
    shapes = shapes_of(config, in_file=True)
    arrays = {name: numbers(*shape, start=5) for name, shape in shapes.items() if name not in without} | changed
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in arrays.items():
        raw = (
            (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
            if dtype == "BF16"
            else array.tobytes()
        )
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    write_file(place / "model.safetensors", header, data)
    write_json(place / "config.json", config)
    return place


def merge(source: Path, output: Path, **options: Any) -> Report:
    return unshard.merge(source, output, **options)


def refuse(source: Path, output: Path, **options: Any) -> UnshardError:
    with pytest.raises(UnshardError) as caught:
        unshard.merge(source, output, **options)
    assert not output.exists()
    return caught.value


def note_on(report: Report, word: str) -> tuple[str, tuple[str, ...]]:
    """The only note with a word in it: its text and the tensors it is about."""
    (note,) = [note for note in report.notes if word in note.text]
    return note.text, note.tensors


# -- what is filled ----------------------------------------------------------------------------------------------------

Names = tuple[str, ...]
VISION_2 = {**VISION, "architectures": ["Qwen2VLForConditionalGeneration"]}
ATTENTION = "model.layers.1.self_attn.k_proj.weight"
CASES: dict[str, tuple[dict[str, Any], Names, Names, Callable[[str], str]]] = {
    "the embedding": (QWEN2, ("model.embed_tokens.weight",), ("model.embed_tokens.weight",), str),
    "an embedding that serves as the head": (TIED, ("model.embed_tokens.weight",), ("model.embed_tokens.weight",), str),
    "a head": (QWEN2, ("lm_head.weight",), ("lm_head.weight",), str),
    "below DDP": (QWEN2, (ATTENTION,), (ATTENTION,), "module.{}".format),
    "in a trainer's own module": (QWEN2, (ATTENTION,), (ATTENTION,), "actor.model.{}".format),
    "below torch.compile": (QWEN2, (ATTENTION,), (ATTENTION,), lambda name: name.replace("layers", "_orig_mod.layers")),
    "packed experts": (
        MOE,
        ("model.layers.0.mlp.experts.down_proj",),
        tuple([f"model.layers.0.mlp.experts.{expert}.down_proj.weight" for expert in range(3)]),
        str,
    ),
    "a vision tower's": (
        VISION_2,
        ("model.visual.blocks.0.attn.qkv.weight", "model.language_model.norm.weight"),
        ("visual.blocks.0.attn.qkv.weight", "model.norm.weight"),
        str,
    ),
    "no family": (TOY, ("block.1.weight",), ("block.1.weight",), str),
}  # fmt: skip


@pytest.mark.parametrize(("config", "without", "filled", "rename"), CASES.values(), ids=CASES)
def test_what_is_absent_is_filled_and_nothing_else(
    config: dict[str, Any], without: Names, filled: Names, rename: Callable[[str], str], tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "ckpt", config, without, rename)
    whole = write_checkpoint(tmp_path / "whole", config, ())
    base = write_base(tmp_path / "base", config)
    report = merge(source, tmp_path / "out", fill_from=base)
    merge(whole, tmp_path / "expected")
    found, own, given = [read_tensors(place) for place in (tmp_path / "out", tmp_path / "expected", base)]
    assert_equal(found, {name: (given if name in filled else own)[name] for name in own})
    text, names = note_on(report, "saved without")
    assert text.startswith(f"{len(filled)} parameter")
    assert f"`{base}`" in text
    assert set(names) == set(filled)
    assert unshard.verify(tmp_path / "out", source, fill_from=base).holds
    assert not unshard.verify(
        tmp_path / "out", source, fill_from=write_base(tmp_path / "b", config, dtype="BF16")
    ).holds


def test_without_a_base_model_one_error_names_all_that_is_missing(tmp_path: Path) -> None:
    missing = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(2)] + ["model.norm.weight"]
    error = refuse(write_checkpoint(tmp_path / "ckpt", QWEN2, missing), tmp_path / "out")
    assert "3 tensors of Qwen2ForCausalLM missing" in error.message
    assert "model.layers.[0-1].mlp.up_proj.weight" in error.message
    assert "model.norm.weight" in error.message
    assert not error.problems
    assert f"unshard merge {tmp_path / 'ckpt'} OUT --fill-from DIR" in str(error.hint)


def test_a_checkpoint_that_lacks_nothing_is_left_alone_and_that_is_said(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "ckpt", QWEN2, ())
    report = merge(source, tmp_path / "out", fill_from=write_base(tmp_path / "base", QWEN2))
    assert note_on(report, "nothing to give")
    merge(source, tmp_path / "plain")
    assert_equal(read_tensors(tmp_path / "out"), read_tensors(tmp_path / "plain"))


def test_a_head_of_the_base_model_does_not_come_into_a_classifier(tmp_path: Path) -> None:
    config = {**QWEN2, "architectures": ["Qwen2ForSequenceClassification"], "num_labels": 3}
    source = write_checkpoint(tmp_path / "ckpt", config, ("model.embed_tokens.weight",))
    merge(source, tmp_path / "out", fill_from=write_base(tmp_path / "base", QWEN2))
    found = read_tensors(tmp_path / "out")
    assert "lm_head.weight" not in found
    assert found["score.weight"].shape == (3, 8)


def test_names_of_a_reference_are_followed_when_a_base_model_fills(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "ckpt", QWEN2, ("model.norm.weight",))
    base = write_base(tmp_path / "base", QWEN2)
    merge(source, tmp_path / "out", fill_from=base, names=base)
    found = read_tensors(tmp_path / "out")
    assert found.keys() == read_tensors(base).keys()
    assert found["model.norm.weight"] == read_tensors(base)["model.norm.weight"]


# -- types -------------------------------------------------------------------------------------------------------------


def test_a_filled_parameter_keeps_its_type_and_mixed_types_are_said(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "ckpt", QWEN2, ("model.norm.weight",))
    base = write_base(tmp_path / "base", QWEN2, dtype="BF16")
    report = merge(source, tmp_path / "out", fill_from=base)
    assert read_tensors(tmp_path / "out")["model.norm.weight"] == read_tensors(base)["model.norm.weight"]
    assert "BF16 beside the checkpoint's F32" in note_on(report, "types are mixed")[0]
    merge(source, tmp_path / "cast", fill_from=base, dtype="bf16")
    assert {tensor.dtype for tensor in read_tensors(tmp_path / "cast").values()} == {"BF16"}


def case(name: str, part: str) -> Path:
    return COMMITTED / name / part


@pytest.mark.parametrize("name", ["deepspeed_z2_excluded", "deepspeed_z3_excluded"])
def test_beside_masters_a_filled_parameter_is_widened_exactly(name: str, tmp_path: Path) -> None:
    base = case(name, "truth16")
    report = merge(case(name, "ckpt"), tmp_path / "out", fill_from=base)
    assert_equal(read_tensors(tmp_path / "out"), read_tensors(case(name, "truth")))
    assert "1 widened exactly to fp32" in note_on(report, "saved without")[0]
    assert report.weights == "master"
    report = merge(case(name, "ckpt"), tmp_path / "low", fill_from=base, weights="model")
    assert_equal(read_tensors(tmp_path / "low"), read_tensors(base))
    assert "widened" not in note_on(report, "saved without")[0]
    assert report.weights == "model"
    assert report.to_json()["weights"] == "model"


# -- what is recorded as left out --------------------------------------------------------------------------------------

LEFT_OUT = {"module.model.norm.weight": (8,), "module.model.layers.0.mlp.down_proj.weight": (8, 12)}


def naming(excluded: Mapping[str, tuple[int, ...]], **more: Any) -> Any:
    shapes = {f"module.{name}": shape for name, shape in shapes_of(QWEN2, in_file=False).items()}
    tensors = {name: Tensor(name, F32, shape, ()) for name, shape in shapes.items() if name not in excluded}
    return name_model(tensors, QWEN2, MergeOptions(**more.pop("options", {})), excluded=excluded, **more)


def test_parameters_recorded_as_left_out_are_one_error() -> None:
    model = naming(LEFT_OUT, source="run/step 5")
    (problem,) = model.problems
    assert isinstance(problem, IncompleteError)
    assert "saved without 2 parameters" in problem.message
    assert "model.norm.weight" in problem.message
    assert "model.layers.0.mlp.down_proj.weight" in problem.message
    assert "unshard merge 'run/step 5' OUT --fill-from DIR" in str(problem.hint)


def test_parameters_recorded_as_left_out_are_filled() -> None:
    tensors = {name: Tensor(name, F32, shape, ()) for name, shape in shapes_of(QWEN2, in_file=True).items()}
    model = naming(LEFT_OUT, base=Base(tensors, "base"))
    assert not model.problems
    assert model.tensors.keys() == tensors.keys()


def test_stored_names_are_written_without_what_was_left_out_and_that_is_a_warning() -> None:
    for options in ({"weights_only": True}, {"names": "stored"}):
        model = naming(LEFT_OUT, options=options)
        (note,) = [note for note in model.notes if "saved without 2 parameters" in note.text]
        assert note.level == "warning"
        assert set(note.tensors) == LEFT_OUT.keys()


# -- adapters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lora_only", "dcp_lora_only"])
def test_an_adapter_alone_gets_its_base_model(name: str, tmp_path: Path) -> None:
    source, base = case(name, "ckpt"), case(name, "truth")
    report = merge(source, tmp_path / "out", fill_from=base)
    assert_equal(read_tensors(tmp_path / "out"), read_tensors(base))
    assert_equal(read_tensors(tmp_path / "out" / "lora_adapter"), read_tensors(case(name, "truth_adapter")))
    assert note_on(report, "do not contain the adapter")
    merge(source, tmp_path / "fused", fill_from=base, fuse_lora=True)
    assert_fused(read_tensors(tmp_path / "fused"), read_tensors(case(name, "truth_merged")), read_tensors(base))
    for output, options in (("out", {}), ("fused", {"fuse_lora": True})):
        assert unshard.verify(tmp_path / output, source, fill_from=base, **options).holds


def test_a_peft_directory_gets_its_base_model_with_config_and_all(tmp_path: Path) -> None:
    source, base = case("lora_only", "truth_adapter"), case("lora_only", "truth")
    report = merge(source, tmp_path / "out", fill_from=base, fuse_lora=True)
    truth = read_tensors(case("lora_only", "truth_merged"))
    assert_fused(read_tensors(tmp_path / "out"), truth, read_tensors(base))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"
    assert (tmp_path / "out" / "generation_config.json").is_file()
    assert note_on(report, "there is no config.json")
    assert unshard.verify(tmp_path / "out", source, fill_from=base, fuse_lora=True).holds


def write_adapted(place: Path, config: dict[str, Any], arrays: Mapping[str, Array], **facts: Any) -> Path:
    """An adapter of rank 2 in a training checkpoint, with PEFT's config beside it."""
    write_ranks(place, world(2), {f"base_model.model.{name}": array for name, array in arrays.items()}, **config)
    write_json(
        place / "adapter_config.json",
        {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **facts},
    )
    return place


QUERY = "model.layers.0.self_attn.q_proj"
LORA = {f"{QUERY}.lora_A.default.weight": numbers(2, 8), f"{QUERY}.lora_B.default.weight": numbers(8, 2)}


def test_what_an_adapter_s_checkpoint_has_of_the_base_stays(tmp_path: Path) -> None:
    """A trained embedding in the checkpoint, all else left out: fused into what the base model gives."""
    trained = numbers(20, 8, start=7000)
    arrays = {**LORA, "model.embed_tokens.weight": trained}
    source, base = write_adapted(tmp_path / "ckpt", QWEN2, arrays), write_base(tmp_path / "base", QWEN2)
    report = merge(source, tmp_path / "out", fill_from=base, fuse_lora=True)
    found, given = read_tensors(tmp_path / "out"), read_tensors(base)
    assert found["model.embed_tokens.weight"].data == trained.tobytes()
    fused = given[f"{QUERY}.weight"].values() + 2 * (numbers(8, 2) @ numbers(2, 8))
    assert np.array_equal(found[f"{QUERY}.weight"].values(), fused)
    assert found.keys() == given.keys()
    changed = {name for name in found if found[name] != given[name]}
    assert changed == {f"{QUERY}.weight", "model.embed_tokens.weight"}
    assert len(note_on(report, "saved without")[1]) == len(given) - 1
    assert unshard.verify(tmp_path / "out", source, fill_from=base, fuse_lora=True).holds


def test_an_adapter_of_packed_experts_is_fused_into_the_experts_of_the_file(tmp_path: Path) -> None:
    module = "model.layers.1.mlp.experts"
    a, b = numbers(6, 5), numbers(8, 6)
    arrays = {f"{module}.lora_A.default.weight": a, f"{module}.lora_B.default.weight": b}
    source = write_adapted(
        tmp_path / "ckpt", MOE, arrays, target_modules=[], target_parameters=["mlp.experts.down_proj"]
    )
    base = write_base(tmp_path / "base", MOE)
    merge(source, tmp_path / "out", fill_from=base, fuse_lora=True)
    found, given = read_tensors(tmp_path / "out"), read_tensors(base)
    assert found.keys() == given.keys()
    for expert in range(3):
        name = f"{module}.{expert}.down_proj.weight"
        delta = b.reshape(8, 2, 3)[:, :, expert] @ a.reshape(3, 2, 5)[expert]
        assert np.array_equal(found[name].values(), given[name].values() + 2 * delta), expert
    changed = {name for name in found if found[name] != given[name]}
    assert changed == {f"{module}.{expert}.down_proj.weight" for expert in range(3)}


def test_an_adapter_whose_start_changed_the_base_is_not_fused_into_the_original(tmp_path: Path) -> None:
    source = write_adapted(tmp_path / "ckpt", QWEN2, LORA, init_lora_weights="pissa_niter_16")
    base = write_base(tmp_path / "base", QWEN2)
    error = refuse(source, tmp_path / "out", fill_from=base, fuse_lora=True)
    assert isinstance(error, ModelError)
    assert "pissa_niter_16 changed the base weights" in error.message
    merge(source, tmp_path / "out", fill_from=base)
    written = json.loads((tmp_path / "out" / "lora_adapter" / "adapter_config.json").read_text())
    assert written["init_lora_weights"] == "pissa_niter_16"  # PEFT repeats it, on the weights as they were before


def test_the_base_model_s_own_name_is_told(tmp_path: Path) -> None:
    """verl#4948: nobody could tell whether the base model or a fine-tuned one was under the adapter."""
    source = write_adapted(tmp_path / "ckpt", QWEN2, LORA, base_model_name_or_path="my/sft-model")
    report = merge(source, tmp_path / "out", fill_from=write_base(tmp_path / "base", QWEN2))
    assert "my/sft-model" in note_on(report, "calls the base model")[0]


def test_missing_base_weights_of_an_adapter_lead_to_a_base_model_or_to_the_adapter_alone(tmp_path: Path) -> None:
    arrays = {**LORA, "model.embed_tokens.weight": numbers(20, 8)}
    source = write_adapted(tmp_path / "ckpt", QWEN2, arrays)
    error = refuse(source, tmp_path / "out")
    assert f"unshard merge {source} OUT --fill-from DIR" in str(error.hint)
    assert f"unshard merge {source} OUT --adapter-only" in str(error.hint)
    merge(source, tmp_path / "out", adapter_only=True)
    alone = write_adapted(tmp_path / "alone", QWEN2, LORA)
    assert "--fill-from DIR" in str(refuse(alone, tmp_path / "fused", fuse_lora=True).hint)


def test_a_wrong_index_of_the_base_model_is_told_with_its_place_and_repaired_when_asked(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "ckpt", QWEN2, ("model.norm.weight",))
    base = tmp_path / "base"
    merge(write_base(tmp_path / "whole", QWEN2), base, max_shard_size=600)
    index = json.loads((base / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"]["model.norm.weight"] = next(
        file for file in files if file != index["weight_map"]["model.norm.weight"]
    )
    write_json(base / "model.safetensors.index.json", index)
    error = refuse(source, tmp_path / "out", fill_from=base)
    assert error.message.startswith(f"`{base}`: model.safetensors.index.json names the wrong file")
    assert "--repair-index" in str(error.hint)
    report = merge(source, tmp_path / "out", fill_from=base, repair_index=True)
    assert f"`{base}`: " in note_on(report, "model.safetensors.index.json")[0]
    assert unshard.verify(tmp_path / "out", source, fill_from=base, repair_index=True).holds


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_base_model_that_lacks_some_too_is_refused_with_their_names(tmp_path: Path) -> None:
    names = ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"]
    source = write_checkpoint(tmp_path / "ckpt", QWEN2, names)
    error = refuse(source, tmp_path / "out", fill_from=write_base(tmp_path / "base", QWEN2, names[:1]))
    assert "1 tensor of Qwen2ForCausalLM missing" in error.message
    assert "model.norm.weight" in error.message
    assert "up_proj" not in error.message
    assert "does not have them either" in str(error.hint)


def test_a_base_model_of_other_sizes_is_refused_with_both_shapes(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "ckpt", QWEN2, ("model.norm.weight",))
    base = write_base(tmp_path / "base", QWEN2, **{"model.norm.weight": numbers(16)})
    error = refuse(source, tmp_path / "out", fill_from=base)
    assert "model.norm.weight: shape [16], expected [8]" in error.message


def test_a_head_does_not_take_the_place_of_the_embedding_that_a_base_model_gives(tmp_path: Path) -> None:
    """`--tie-word-embedding` made the trained head the embedding, and left the config untied without a head."""
    source = write_checkpoint(tmp_path / "ckpt", QWEN2, ("model.embed_tokens.weight",))
    base = write_base(tmp_path / "base", QWEN2)
    error = refuse(source, tmp_path / "out", fill_from=base, tie_embeddings=True)
    assert "lm_head.weight in the place of model.embed_tokens.weight" in error.message
    report = merge(source, tmp_path / "tied", tie_embeddings=True)
    assert "tie_word_embeddings becomes true" in note_on(report, "tie_word_embeddings")[0]
    assert json.loads((tmp_path / "tied" / "config.json").read_text())["tie_word_embeddings"] is True
    assert unshard.verify(tmp_path / "tied").holds


def test_a_misshapen_tensor_of_the_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    arrays = {name: numbers(*shape) for name, shape in shapes_of(QWEN2, in_file=False).items()}
    source = write_ranks(tmp_path / "ckpt", world(2), {**arrays, "model.norm.weight": numbers(6)}, **QWEN2)
    error = refuse(source, tmp_path / "out", fill_from=write_base(tmp_path / "base", QWEN2))
    assert "model.norm.weight: shape [6], expected [8]" in error.message


def test_a_model_of_no_family_is_filled_by_one_of_its_class_alone(tmp_path: Path) -> None:
    """Nothing tells which parameters it has: the base model must, and must know every tensor of the checkpoint."""
    source = write_checkpoint(tmp_path / "ckpt", TOY, ("block.1.weight",))
    write_base(tmp_path / "other", {**TOY, "architectures": ["ToyForSequenceClassification"]})
    assert "ToyForSequenceClassification" in refuse(source, tmp_path / "out", fill_from=tmp_path / "other").message
    base = write_base(tmp_path / "base", TOY, ("embed.weight",), **{"block.0.weight": numbers(4, 5)})
    error = refuse(source, tmp_path / "out", fill_from=base)
    assert "1 tensor unknown to the base model" in error.message
    assert "embed.weight" in error.message
    assert "block.0.weight: shape [4, 4], expected [4, 5]" in error.message


def test_a_base_model_of_another_type_or_quantised_is_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "ckpt", QWEN2, ("model.norm.weight",))
    other = {**QWEN2, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    error = refuse(source, tmp_path / "out", fill_from=write_base(tmp_path / "llama", other))
    assert isinstance(error, UsageError)
    assert "type llama" in error.message
    assert "type qwen2" in error.message
    quantised = write_base(tmp_path / "fp8", {**QWEN2, "quantization_config": {"quant_method": "fp8"}})
    assert "quantised" in refuse(source, tmp_path / "out", fill_from=quantised).message


def test_what_is_no_base_model_is_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "ckpt", QWEN2, ("model.norm.weight",))
    adapter = case("lora_only", "truth_adapter")
    assert "a PEFT adapter lies there" in refuse(source, tmp_path / "out", fill_from=adapter).message
    for place in (tmp_path / "nowhere", source):
        assert "no Hugging Face model directory" in refuse(source, tmp_path / "out", fill_from=place).message


@pytest.mark.parametrize("options", [{"weights_only": True}, {"names": "stored"}, {"adapter_only": True}])
def test_outputs_that_have_no_room_for_a_base_model_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "ckpt", QWEN2, ("model.norm.weight",))
    error = refuse(source, tmp_path / "out", fill_from=write_base(tmp_path / "base", QWEN2), **options)
    assert isinstance(error, UsageError)
    assert "`--fill-from` has nothing to add" in error.message


def test_a_config_of_the_checkpoint_s_own_goes_first(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "ckpt", QWEN2, ("model.norm.weight",))
    base = write_base(tmp_path / "base", {**QWEN2, "rope_theta": 5})
    merge(source, tmp_path / "out", fill_from=base)
    assert "rope_theta" not in json.loads((tmp_path / "out" / "config.json").read_text())
    shutil.rmtree(source / "huggingface")
    merge(source, tmp_path / "filled", fill_from=base)
    assert json.loads((tmp_path / "filled" / "config.json").read_text())["rope_theta"] == 5


def test_a_tokenizer_of_the_checkpoint_s_own_stays_without_that_of_the_base_model(tmp_path: Path) -> None:
    source = Path(shutil.copytree(case("lora_only", "truth_adapter"), tmp_path / "adapter"))
    base = Path(shutil.copytree(case("lora_only", "truth"), tmp_path / "base"))
    (source / "tokenizer.json").write_text("{}")
    (base / "tokenizer.json").write_text('{"of": "the base"}')
    (base / "chat_template.jinja").write_text("of the base")
    merge(source, tmp_path / "out", fill_from=base)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "out" / "chat_template.jinja").exists()


# -- --weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["master", "model"])
def test_weights_cannot_be_chosen_where_they_are_kept_once(weights: str, tmp_path: Path) -> None:
    for source in (
        write_checkpoint(tmp_path / "ckpt", QWEN2, ()),
        case("fsdp2_w4", "truth"),
        case("dcp_fsdp2", "ckpt"),
    ):
        error = refuse(source, tmp_path / "out", weights=weights)
        assert isinstance(error, UsageError)
        assert "keeps its parameters once" in error.message
        assert error.hint == "leave `--weights` out"


def test_weights_are_one_of_two_words() -> None:
    with pytest.raises(UsageError, match="weights is 'fp32', which is none of master, model"):
        MergeOptions(weights="fp32")  # type: ignore[arg-type]


def test_an_opened_checkpoint_has_the_weights_that_were_asked_for() -> None:
    name = "deepspeed_z2_bf16"
    assert {tensor.dtype for tensor in unshard.open(case(name, "ckpt")).values()} == {"F32"}
    low = unshard.open(case(name, "ckpt"), weights="model")
    assert {tensor.dtype for tensor in low.values()} == {"BF16"}
    catalog: Checkpoint = low.checkpoint
    assert catalog.weights == "model"
