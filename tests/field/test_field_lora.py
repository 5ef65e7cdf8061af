"""Faults from the field with LoRA checkpoints: adapters that are lost, without strength, or fused with lost bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from field_cases import copy_case, edit_json, merge, refuse, same, truth, warnings, words

from fsdp_bytes import Array, numbers, world, write_json, write_ranks
from golden.tensor_files import read_tensors
from unshard.errors import ModelError

BF16 = np.dtype(ml_dtypes.bfloat16)
PEFT = "base_model.model."
TOY = {"model_type": "toy", "architectures": ["ToyForCausalLM"]}


def adapter_config(output: Path) -> dict[str, Any]:
    """The adapter_config.json that was written."""
    content: dict[str, Any] = json.loads((output / "adapter_config.json").read_text())
    return content


def write_adapted(directory: Path, weight: Array, a: Array, b: Array, **more: Array) -> Path:
    """A PEFT model of one adapted layer `proj`, with r and alpha in verl's meta file: alpha is twice the rank."""
    layer = f"{PEFT}proj"
    tensors = {
        f"{layer}.base_layer.weight": weight,
        f"{layer}.lora_A.default.weight": a,
        f"{layer}.lora_B.default.weight": b,
        **more,
    }
    write_ranks(directory, world(2), tensors, **TOY)
    rank = a.shape[0] or 4
    facts = {"r": rank, "lora_alpha": 2 * rank, "task_type": "CAUSAL_LM"}
    write_json(directory / "lora_train_meta.json", facts)
    return directory


def test_base_beside_an_adapter_is_said_to_be_the_base(tmp_path: Path) -> None:
    """verl#7285, verl#4553, verl#3087: the "merged" model was byte-identical to the base, and nothing said so."""
    source = copy_case("lora", tmp_path / "actor")
    report, found = merge(source, tmp_path / "out")
    assert found == truth("lora")
    assert "do not contain the adapter" in warnings(report)
    assert "--fuse-lora" in warnings(report)
    assert read_tensors(tmp_path / "out" / "lora_adapter") == truth("lora", "truth_adapter")
    report, fused = merge(source, tmp_path / "fused", fuse_lora=True)
    assert "do not contain" not in words(report)
    changed = {name for name in fused if fused[name] != found[name]}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "v_proj", "down_proj"}
    assert {entry.name for entry in report.rounded} == changed


@pytest.mark.parametrize(
    ("file", "facts"),
    [
        (None, {}),
        ("lora_train_meta.json", {"r": 4, "lora_alpha": 0, "task_type": "CAUSAL_LM"}),
        ("lora_train_meta.json", {"r": 4, "task_type": "CAUSAL_LM"}),
        ("adapter_config.json", {"peft_type": "LORA", "r": 4, "lora_alpha": 0, "target_modules": ["q_proj"]}),
        ("huggingface/adapter_config.json", {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}),
    ],
)
@pytest.mark.parametrize("options", [{}, {"fuse_lora": True}, {"adapter_only": True}], ids=str)
def test_lora_alpha_unknown_is_refused_never_zero(
    options: dict[str, bool], file: str | None, facts: dict[str, Any], tmp_path: Path
) -> None:
    """verl#3050, verl#5325: adapter_config.json said `"lora_alpha": 0`, so that the adapter had no effect."""
    source = copy_case("lora_no_alpha", tmp_path / "actor")
    if file is not None:
        write_json(source / file, facts)
    error = refuse(source, tmp_path / "out", **options)
    assert "alpha" in error.message
    assert "--lora-alpha" in str(error.hint)


def test_lora_alpha_that_is_given_is_written(tmp_path: Path) -> None:
    """verl#5325: the way out of an unknown alpha."""
    source = copy_case("lora_no_alpha", tmp_path / "actor")
    merge(source, tmp_path / "out", lora_alpha=16, adapter_only=True)
    assert adapter_config(tmp_path / "out")["lora_alpha"] == 16
    assert isinstance(refuse(source, tmp_path / "no", lora_alpha=0), Exception)


@pytest.mark.parametrize("stated", ["CAUSAL_LM", "TaskType.CAUSAL_LM", {"value": "CAUSAL_LM"}, "causal_lm", None, ""])
def test_task_type_may_be_a_string_or_an_enumeration(stated: Any, tmp_path: Path) -> None:
    """verl#5742: "'str' object has no attribute 'value'" of a task type that came back as text."""
    source = copy_case("lora", tmp_path / "actor")
    write_json(source / "lora_train_meta.json", {"r": 4, "lora_alpha": 8, "task_type": stated})
    merge(source, tmp_path / "out")
    assert adapter_config(tmp_path / "out" / "lora_adapter")["task_type"] == "CAUSAL_LM"


def test_report_names_the_base_that_the_adapter_was_trained_on(tmp_path: Path) -> None:
    """verl#4948: "does this merge with the base or with my SFT model?": the tool did not say."""
    source = copy_case("lora", tmp_path / "actor")
    assert "not recorded" in words(merge(source, tmp_path / "unknown")[0])
    facts = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "/models/my-sft-model"}
    write_json(source / "adapter_config.json", facts)
    report = merge(source, tmp_path / "out")[0]
    assert "/models/my-sft-model" in words(report)
    assert "as the checkpoint holds them" in words(report)
    assert adapter_config(tmp_path / "out" / "lora_adapter")["base_model_name_or_path"] == "/models/my-sft-model"


@pytest.mark.parametrize("kind", ["lora_A", "lora_B"])
def test_half_an_adapter_is_never_dropped_silently(kind: str, tmp_path: Path) -> None:
    """NeMo-RL#2234: a filter at loading "silently drops adapter parameters"."""
    layer = f"{PEFT}other.{kind}.default.weight"
    source = write_adapted(tmp_path / "actor", numbers(6, 4), numbers(2, 4), numbers(6, 2), **{layer: numbers(2, 2)})
    for options in ({}, {"fuse_lora": True}, {"adapter_only": True}):
        assert "other" in refuse(source, tmp_path / "out", **options).message


def test_empty_adapter_is_never_written_as_one(tmp_path: Path) -> None:
    """trl#4416, peft#2892: an adapter_model.safetensors of 40 bytes, all shapes `[0]`, since nothing was gathered."""
    source = write_adapted(tmp_path / "actor", numbers(6, 4), numbers(0), numbers(0))
    for options in ({}, {"fuse_lora": True}, {"adapter_only": True}):
        assert "empty" in refuse(source, tmp_path / "out", **options).message


def test_every_adapter_tensor_is_written(tmp_path: Path) -> None:
    """NeMo-RL#2190: what the base does not have was filtered away."""
    a, b = numbers(2, 4), numbers(6, 2)
    source = write_adapted(tmp_path / "actor", numbers(6, 4), a, b)
    expected = {f"{PEFT}proj.lora_A.weight": a, f"{PEFT}proj.lora_B.weight": b}
    assert same(merge(source, tmp_path / "only", adapter_only=True)[1], expected)
    merge(source, tmp_path / "both")
    assert same(read_tensors(tmp_path / "both" / "lora_adapter"), expected)


def test_adapter_is_fused_in_fp32_and_rounded_once(tmp_path: Path) -> None:
    """Megatron-Bridge#2574: merging in bf16 lost precision.

    All products and sums are whole numbers below 2**24, so that fp32 holds them exactly, in whatever order; bf16 holds
    whole numbers up to 256.
    """
    random = np.random.default_rng(7)
    weight = random.integers(-200, 200, (48, 40)).astype(BF16)
    a, b = random.integers(-9, 9, (16, 40)).astype(BF16), random.integers(-9, 9, (48, 16)).astype(BF16)
    source = write_adapted(tmp_path / "actor", weight, a, b)
    product = b.astype(np.float32) @ a.astype(np.float32)
    exact = (weight.astype(np.float32) + 2 * product).astype(BF16)
    assert (exact != weight + np.float32(2).astype(BF16) * product.astype(BF16)).any()
    found = merge(source, tmp_path / "out", fuse_lora=True)[1]
    assert same(found, {"proj.weight": exact})
    wide = merge(source, tmp_path / "wide", fuse_lora=True, dtype="fp32")[1]
    assert same(wide, {"proj.weight": weight.astype(np.float32) + 2 * product})


def quantised(directory: Path, shape: tuple[int, int] = (12, 1)) -> Path:
    """A QLoRA run: four-bit weights, two to a byte in one column, with tensors that bitsandbytes keeps beside them."""
    layer = f"{PEFT}proj"
    more = {
        f"{layer}.base_layer.weight.absmax": numbers(1, dtype=np.float32),
        f"{layer}.base_layer.weight.quant_map": numbers(16, dtype=np.float32),
    }
    return write_adapted(directory, numbers(*shape, dtype=np.uint8), numbers(2, 4), numbers(6, 2), **more)


def test_adapter_of_a_quantised_base_is_a_peft_directory(tmp_path: Path) -> None:
    """LlamaFactory#3573: an FSDP + QLoRA checkpoint was given as adapter: "Repo id must be in the form …"."""
    source = quantised(tmp_path / "actor")
    found = merge(source, tmp_path / "out", adapter_only=True)[1]
    assert set(found) == {f"{PEFT}proj.lora_A.weight", f"{PEFT}proj.lora_B.weight"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert adapter_config(tmp_path / "out")["target_modules"] == ["proj"]


@pytest.mark.parametrize("shape", [(12, 1), (6, 4)])
def test_quantised_base_is_never_fused_as_if_it_were_floats(shape: tuple[int, int], tmp_path: Path) -> None:
    """LlamaFactory#3573: the bytes of a quantised weight are no numbers that an adapter could be added to."""
    error = refuse(quantised(tmp_path / "actor", shape), tmp_path / "out", fuse_lora=True)
    assert isinstance(error, ModelError)
    assert "proj" in error.message


def test_merged_lora_run_has_config_and_tokenizer(tmp_path: Path) -> None:
    """axolotl#3294: the merged directory of a LoRA run under FSDP2 had weights and nothing else."""
    source = copy_case("lora", tmp_path / "actor")
    beside = {path.name: path.read_bytes() for path in (source / "huggingface").iterdir()}
    for number, options in enumerate(({}, {"fuse_lora": True})):
        output = tmp_path / f"out{number}"
        merge(source, output, **options)
        assert {name: (output / name).read_bytes() for name in beside} == beside


def test_tied_embedding_that_only_one_side_adapts_needs_a_decision(tmp_path: Path) -> None:
    """verl#6334 under LoRA: fused, the two tied matrices are no longer one."""
    source = copy_case("lora_embedding", tmp_path / "actor")
    edit_json(source / "huggingface" / "config.json", tie_word_embeddings=True)
    error = refuse(source, tmp_path / "out", fuse_lora=True)
    assert "tie" in error.message
    assert "--untie-word-embedding" in str(error.hint)
