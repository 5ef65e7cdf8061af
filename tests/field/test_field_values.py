"""Faults from the field in what comes out: values, dtypes, ties, names, heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from field_cases import copy_case, edit_json, merge, refuse, rewrite_case, same, truth, truth_arrays, words

import unshard
from fsdp_bytes import Mesh, RankFile, numbers, rank_path, world, write_json, write_ranks
from unshard.errors import IncompleteError, ModelError

BF16 = np.dtype(ml_dtypes.bfloat16)
TOY: dict[str, Any] = {"model_type": "toy", "architectures": ["ToyForCausalLM"], "tie_word_embeddings": True}
"""The config of a model that no family describes."""


def write_with_buffers(directory: Path, buffers: list[dict[str, Any]]) -> Path:
    """Ranks that share one sharded weight; each has its own replica of the buffers."""
    mesh = world(len(buffers))
    for rank, values in enumerate(buffers):
        file = RankFile(mesh, rank)
        file.add_shard("layers.0.weight", numbers(16, 4))
        for name, value in values.items():
            file.add_plain(name, value)
        file.write(rank_path(directory, mesh, rank))
    return directory


def test_replicated_buffer_is_never_concatenated(tmp_path: Path) -> None:
    """verl#7612: `layer_scalar [1] -> [8]`, `std_scale [1152] -> [9216]`: plain tensors of all ranks were joined."""
    buffers = {"layer_scalar": numbers(1), "vision_tower.std_scale": numbers(1152), "scalar": numbers()}
    source = write_with_buffers(tmp_path, [buffers] * 8)
    found = merge(source, tmp_path / "out", weights_only=True)[1]
    assert same(found, {"layers.0.weight": numbers(16, 4), **buffers})


def test_replicas_that_differ_are_refused_when_they_are_compared(tmp_path: Path) -> None:
    """verl#7612: nobody looked whether the ranks agree."""
    other = numbers(1152)
    other[700] += 1
    source = write_with_buffers(tmp_path, [{"scale": numbers(1152)}, {"scale": other}])
    with pytest.raises(IncompleteError, match="scale"):
        unshard.merge(source, tmp_path / "out", weights_only=True, check_replicas=True)
    assert not (tmp_path / "out").exists()


def test_stored_dtype_is_kept_unless_another_is_asked_for(tmp_path: Path) -> None:
    """Verl `fsdp_model_merger.py`: every tensor goes through `.bfloat16()`, fp32 masters, integers and booleans too."""
    tensors = {
        "weight": numbers(4, 3) / 3,
        "half": numbers(5, dtype=np.float16) / 3,
        "ids": numbers(6, dtype=np.int64) + 2**40,
        "mask": numbers(6, dtype=np.bool_),
        "bytes": numbers(300, dtype=np.uint8),
    }
    source = write_ranks(tmp_path / "actor", world(2), tensors)
    report, found = merge(source, tmp_path / "kept", weights_only=True)
    assert same(found, tensors)
    assert report.rounded == ()
    report, found = merge(source, tmp_path / "cast", weights_only=True, dtype="bf16")
    cast = {name: value.astype(BF16) if name in ("weight", "half") else value for name, value in tensors.items()}
    assert same(found, cast)
    assert {(entry.name, entry.source, entry.result) for entry in report.rounded} == {
        ("weight", "F32", "BF16"),
        ("half", "F16", "BF16"),
    }


@pytest.mark.parametrize(("asked", "header", "config"), [
    ("fp32", "F32", "float32"), ("bf16", "BF16", "bfloat16"), ("fp16", "F16", "float16"),
])  # fmt: skip
@pytest.mark.parametrize("stored", [np.float32, BF16])
def test_dtype_that_was_asked_for_is_in_the_file(
    stored: Any, asked: str, header: str, config: str, tmp_path: Path
) -> None:
    """torchtitan#2041, torchtitan#4166: always fp32; later bf16 was kept though the log said fp32."""
    said = {**TOY, "dtype": "float64" if asked == "fp32" else "float32"}
    source = write_ranks(tmp_path / "actor", world(2), {"weight": numbers(4, 3, dtype=stored)}, **said)
    found = merge(source, tmp_path / "out", dtype=asked)[1]
    assert {tensor.dtype for tensor in found.values()} == {header}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == config


def test_frozen_parameters_keep_their_own_dtype(tmp_path: Path) -> None:
    """DeepSpeed#8378: a function named "fp32" returned frozen parameters in bf16, and nobody said so."""
    tensors = {"frozen": numbers(8, 2, dtype=BF16), "trained": numbers(8, 2) / 3}
    source = write_ranks(tmp_path / "actor", world(2), tensors)
    view = unshard.open(source)
    assert {name: tensor.dtype for name, tensor in view.items()} == {"frozen": "BF16", "trained": "F32"}
    assert same(merge(source, tmp_path / "out", weights_only=True)[1], tensors)
    wide = {name: array.astype(np.float32) for name, array in tensors.items()}
    assert same(merge(source, tmp_path / "wide", weights_only=True, dtype="fp32")[1], wide)


def test_tied_head_is_written_once(tmp_path: Path) -> None:
    """verl#6334: 149 keys instead of 148, since FSDP gathers both names of one tied matrix."""
    embedding = numbers(6, 4)
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": numbers(4), "lm_head.weight": embedding}
    source = write_ranks(tmp_path / "actor", world(2), tensors, **TOY)
    report, found = merge(source, tmp_path / "out")
    assert same(found, {name: array for name, array in tensors.items() if name != "lm_head.weight"})
    assert "lm_head.weight" in report.dropped


def test_tied_head_that_drifted_away_needs_a_decision(tmp_path: Path) -> None:
    """verl#6334: after ten steps 99.87 % of the elements differed, and one of the two was dropped unseen."""
    tensors = {"model.embed_tokens.weight": numbers(6, 4), "lm_head.weight": numbers(6, 4)}
    tensors["lm_head.weight"][5, 3] += 5e-4
    source = write_ranks(tmp_path / "actor", world(2), tensors, **TOY)
    with pytest.raises(ModelError, match="differ") as caught:
        unshard.merge(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert "--tie-word-embedding" in str(caught.value.hint)
    assert "--untie-word-embedding" in str(caught.value.hint)
    assert set(merge(source, tmp_path / "tied", tie_embeddings=True)[1]) == {"model.embed_tokens.weight"}
    assert same(merge(source, tmp_path / "untied", tie_embeddings=False)[1], tensors)
    assert json.loads((tmp_path / "untied" / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("case", ["fsdp2_qwen3_moe", "fsdp2_mixtral"])
def test_packed_experts_come_out_one_by_one(case: str, tmp_path: Path) -> None:
    """verl#6896, vllm#36997, LlamaFactory#10414: transformers 5 packs experts, and consumers expect `experts.7.…`."""
    source = copy_case(case, tmp_path / "actor")
    packed = {name for name in unshard.open(source) if name.endswith(("gate_up_proj", "down_proj"))}
    found = merge(source, tmp_path / "out")[1]
    assert packed
    assert not packed & found.keys()
    assert found == truth(case)
    stored = merge(source, tmp_path / "stored", names="stored")[1]
    assert packed <= stored.keys()
    assert merge(source, tmp_path / "like", names=str(tmp_path / "stored"))[1] == stored


def test_views_into_one_storage_come_out_apart(tmp_path: Path) -> None:
    """safetensors#202, safetensors#304, transformers#28630: "Some tensors share memory" of hundreds of views."""
    whole = numbers(6, 4)
    for rank in range(2):
        file = RankFile(world(2), rank)
        storage = file.keep(whole)
        file.add_view("rows", storage, (2, 4), (4, 1), 8)
        file.add_view("column", storage, (6,), (4,), 1)
        file.add_view("turned", storage, (4, 6), (1, 4), 0)
        file.add_view("same", storage, (6, 4), (4, 1), 0)
        file.write(rank_path(tmp_path, world(2), rank))
    expected = {"rows": whole[2:4], "column": whole[:, 1], "turned": whole.T, "same": whole}
    assert same(merge(tmp_path, tmp_path / "out", weights_only=True)[1], expected)


@pytest.mark.parametrize(("layers", "kind"), [(3, "missing"), (1, "unknown")])
def test_names_that_do_not_match_the_model_are_all_told(layers: int, kind: str, tmp_path: Path) -> None:
    """EasyR1#299, speculators#1131: unmatched keys were passed over, random weights saved, and the model babbled."""
    source = copy_case("fsdp2_bf16_tied", tmp_path / "actor")
    edit_json(source / "huggingface" / "config.json", num_hidden_layers=layers, layer_types=None)
    error = refuse(source, tmp_path / "out")
    assert isinstance(error, ModelError)
    names = {name.split(".", 3)[3] for name in truth("fsdp2_bf16_tied") if name.startswith("model.layers.1.")}
    assert len(names) > 10
    told = error.message.replace("[", "").replace("]", "")
    number = 2 if kind == "missing" else 1
    assert [name for name in names if f"model.layers.{number}.{name}" not in told] == []


@pytest.mark.parametrize("prefix", ["_fsdp_wrapped_module.", "module.", "_orig_mod.", "model."])
def test_wrapper_in_front_of_all_names_is_taken_off(prefix: str, tmp_path: Path) -> None:
    """NeMo-RL#1881, flame#48: checkpoints of wrapped models (`model.model.layers…`) failed at the export."""
    source = rewrite_case("fsdp2_w4", tmp_path / "actor", world(2), lambda name: prefix + name)
    report, found = merge(source, tmp_path / "out")
    assert found == truth("fsdp2_w4")
    assert prefix.strip(".") in words(report)


@pytest.mark.parametrize("prefix", ["module.", "pretrained_model."])
def test_wrapper_of_a_model_that_no_family_knows_is_taken_off(prefix: str, tmp_path: Path) -> None:
    """NeMo-RL#1881: DDP's and TRL's prefixes are known by themselves, without the names that should be there."""
    tensors = {"embeddings.weight": numbers(6, 4), "blocks.0.weight": numbers(4, 4)}
    wrapped = {prefix + name: array for name, array in tensors.items()}
    source = write_ranks(tmp_path / "actor", world(2), wrapped, **TOY)
    assert same(merge(source, tmp_path / "out")[1], tensors)


@pytest.mark.parametrize("wrapper", ["_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod."])
def test_wrapper_of_each_layer_is_taken_off(wrapper: str, tmp_path: Path) -> None:
    """NeMo-RL#1881: wrappers stand in the middle of names as well."""

    def wrap(name: str) -> str:
        return name.replace("layers.0.", f"layers.0.{wrapper}")

    source = rewrite_case("fsdp2_w4", tmp_path / "actor", Mesh({"fsdp": 3}), wrap)
    assert merge(source, tmp_path / "out")[1] == truth("fsdp2_w4")


def test_value_head_makes_a_classifier_not_a_language_model(tmp_path: Path) -> None:
    """miles#2878, VeOmni#795: the critic's head [1, h] was mapped on lm_head, and families fell back to ForCausalLM."""
    source = copy_case("fsdp2_token_classification", tmp_path / "critic")
    config = source / "huggingface" / "config.json"
    name = json.loads(config.read_text())["architectures"][0]
    language_model = name.replace("ForTokenClassification", "ForCausalLM")
    edit_json(config, architectures=[language_model], num_labels=None, id2label=None, label2id=None)
    report, found = merge(source, tmp_path / "out")
    assert found == truth("fsdp2_token_classification")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == [name]
    assert written.get("num_labels", len(written.get("id2label", "ab"))) == found["score.weight"].shape[0]
    assert report.family == name


def test_language_model_is_never_taken_for_a_value_model(tmp_path: Path) -> None:
    """miles#2878: the role was ignored; here what was asked for must be there."""
    source = copy_case("fsdp2_w4", tmp_path / "actor")
    assert "value head" in refuse(source, tmp_path / "out", value_model=True).message


def test_model_that_no_family_knows_is_written_and_said_to_be_unchecked(tmp_path: Path) -> None:
    """verl#5108: a model class that newer transformers renamed ended the merge."""
    source = copy_case("fsdp2_w4", tmp_path / "actor")
    edit_json(source / "huggingface" / "config.json", model_type="vision2seq", architectures=["AutoModelForVision2Seq"])
    report, found = merge(source, tmp_path / "out")
    assert found == truth("fsdp2_w4")
    assert report.family is None
    assert any("architecture" in sentence for sentence in report.verification.unproven)


def test_head_counts_that_contradict_the_config_are_refused(tmp_path: Path) -> None:
    """verl#4370: flags were given against the config, and the merge went on until it broke."""
    source = copy_case("fsdp2_w4", tmp_path / "actor")
    heads = json.loads((source / "huggingface" / "config.json").read_text())["num_attention_heads"]
    assert "--num-attention-heads" in refuse(source, tmp_path / "out", attention_heads=heads + 1).message
    assert merge(source, tmp_path / "out", attention_heads=heads)[1] == truth("fsdp2_w4")


def test_model_that_is_not_that_of_its_shards_is_found(tmp_path: Path) -> None:
    """EasyR1#299: "Merge completed.", and nothing had been compared with the shards."""
    source = copy_case("fsdp2_w4", tmp_path / "actor")
    merge(source, tmp_path / "out")
    assert unshard.verify(tmp_path / "out", source).holds
    arrays = truth_arrays("fsdp2_w4")
    arrays["model.norm.weight"] = arrays["model.norm.weight"] + 1
    other = write_ranks(tmp_path / "other", world(2), arrays)
    write_json(other / "huggingface" / "config.json", json.loads((tmp_path / "out" / "config.json").read_text()))
    verdict = unshard.verify(tmp_path / "out", other)
    assert not verdict.holds
    assert [failure.name for failure in verdict.comparison.failures] == ["model.norm.weight"]
