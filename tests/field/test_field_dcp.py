"""Faults from the field with directories of torch's DCP: accelerate, Trainer, torchtitan, NeMo, VeOmni."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from field_cases import copy_case, merge, refuse, same, truth, truth_arrays, words

import dcp_bytes as db
from fsdp_bytes import numbers, write_json
from golden.tensor_files import read_tensors
from unshard.errors import FormatError, NotACheckpointError

PEFT = "base_model.model.model.layers.0.self_attn.q_proj"
TOY = {"model_type": "toy", "architectures": ["ToyForCausalLM"]}


def write_model(directory: Path, *, root: tuple[str, ...] = ("model",), prefix: str = "", config: bool = True) -> Path:
    """The model of the golden case `fsdp2_w4` as a DCP directory, its config beside it."""
    state: dict[str, object] = {prefix + name: array for name, array in truth_arrays("fsdp2_w4").items()}
    for step in reversed(root):
        state = {step: state}
    db.save(directory, {**state, "optim": {"state": {"x": {"exp_avg": numbers(9)}}, "param_groups": 1}})
    if config:
        copy_case("fsdp2_w4", directory / "huggingface", "ckpt/huggingface")
    return directory


def test_any_level_above_the_directory_of_the_model(tmp_path: Path) -> None:
    """accelerate#2848: `merge-weights checkpoint-2000` failed, it had to be `checkpoint-2000/pytorch_model_fsdp_0`."""
    place = write_model(tmp_path / "run/checkpoint-2000/pytorch_model_fsdp_0")
    db.save(place.parent / "optimizer_0", {"optimizer": {"state": {"x": {"exp_avg": numbers(9)}}}})
    for number, given in enumerate([place, *list(place.parents)[:2]]):
        assert merge(given, tmp_path / f"out{number}")[1] == truth("fsdp2_w4")


def test_metadata_on_another_node(tmp_path: Path) -> None:
    """accelerate#3010: under HYBRID_SHARD, `.metadata` lay on one node alone."""
    source = write_model(tmp_path / "node0/pytorch_model_fsdp_0")
    other = tmp_path / "node1/pytorch_model_fsdp_0"
    other.mkdir(parents=True)
    (source / "__1_0.distcp").rename(other / "__1_0.distcp")
    assert "no .metadata" in refuse(other, tmp_path / "out").message
    assert "--also DIR" in str(refuse(source, tmp_path / "out").hint)
    for number, (here, there) in enumerate([(source, other), (other, source)]):
        options = {"config": source / "huggingface"} if here == other else {}
        assert merge(here, tmp_path / f"out{number}", also=[there], **options)[1] == truth("fsdp2_w4")


@pytest.mark.parametrize("level", ["", "checkpoint-1", "checkpoint-1/pytorch_model_fsdp_0"])
def test_an_ancestor_that_is_called_like_the_model_changes_nothing(level: str, tmp_path: Path) -> None:
    """PR#4119 of accelerate: a path with `pytorch_model_fsdp_0` in an ancestor was taken for the directory itself."""
    run = tmp_path / "pytorch_model_fsdp_0/run"
    write_model(run / "checkpoint-1/pytorch_model_fsdp_0")
    assert merge(run / level, tmp_path / "out")[1] == truth("fsdp2_w4")


@pytest.mark.parametrize("case", ["accelerate_fsdp2_ranks", "accelerate_fsdp1_local", "accelerate_fsdp2_full"])
def test_layouts_that_are_no_dcp_directory(case: str, tmp_path: Path) -> None:
    """PR#4105 of accelerate: `use_dcp=False` writes a file per rank, which `merge-weights` does not read."""
    report, found = merge(copy_case(case, tmp_path / "run"), tmp_path / "out")
    assert found == truth(case)
    assert report.checkpoint.startswith(("FSDP", "pytorch_model_fsdp.bin"))


def test_a_second_model_of_accelerate_is_not_mixed_with_the_first(tmp_path: Path) -> None:
    """In files per rank, `pytorch_model_fsdp_1_rank0.bin` is model 1 of LOCAL as well as of `use_dcp=False`."""
    source = copy_case("accelerate_fsdp2_ranks", tmp_path / "run")
    for path in sorted(source.rglob("pytorch_model_fsdp_0_rank*.bin")):
        shutil.copy(path, path.with_name(path.name.replace("fsdp_0_", "fsdp_1_")))
    message = refuse(source, tmp_path / "out").message
    assert "pytorch_model_fsdp_0_rank*.bin (ranks 0-1)" in message
    assert "pytorch_model_fsdp_1_rank*.bin (ranks 0-1)" in message
    named = next(source.rglob("pytorch_model_fsdp_1_rank0.bin"))
    assert merge(named, tmp_path / "out")[1] == truth("accelerate_fsdp2_ranks")


def test_config_tokenizer_and_shards_come_out(tmp_path: Path) -> None:
    """What `merge_fsdp_weights` and axolotl#3294 leave: one unsharded file, without config and tokenizer."""
    source = write_model(tmp_path / "checkpoint-1/pytorch_model_fsdp_0")
    _, found = merge(source.parent, tmp_path / "out", max_shard_size=4000)
    assert found == truth("fsdp2_w4")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= names
    assert len([name for name in names if name.endswith(".safetensors")]) > 2


@pytest.mark.parametrize(
    ("root", "prefix"),
    [((), ""), (("model",), ""), (("state", "model"), ""), (("model",), "model."), (("app", "model"), "_orig_mod."),
     (("model",), "module."), (("state_dict",), "model.")],
    ids=str,
)  # fmt: skip
def test_every_nesting_and_wrapper_is_taken_off_and_told(root: tuple[str, ...], prefix: str, tmp_path: Path) -> None:
    """torch#137327, flame#15, flame#48, NeMo-RL PR#1881: `state.model.x`, `model.model.*`, model-wrapped keys."""
    report, found = merge(write_model(tmp_path / "ckpt", root=root, prefix=prefix), tmp_path / "out")
    assert found == truth("fsdp2_w4")
    assert (f"`{'.'.join(root)}`" if root else "at the top") in words(report)
    if prefix:
        assert prefix.strip(".") in words(report)


def test_the_tokenizer_of_the_checkpoint_is_taken(tmp_path: Path) -> None:
    """NeMo-RL PR#2210: the tokenizer came from the base model, though training had saved one of its own."""
    source = write_model(tmp_path / "step_10/policy/weights", config=False)
    base = copy_case("fsdp2_w4", tmp_path / "base", "ckpt/huggingface")
    own = source.parent / "tokenizer"
    own.mkdir()
    (own / "tokenizer.json").write_text('{"trained": true}')
    report, found = merge(tmp_path / "step_10", tmp_path / "out", config=base)
    assert found == truth("fsdp2_w4")
    assert json.loads((tmp_path / "out/tokenizer.json").read_text()) == {"trained": True}
    assert "the tokenizer is the checkpoint's own" in words(report)
    assert not (tmp_path / "out/tokenizer_config.json").exists()
    merge(source, tmp_path / "given", config=base, tokenizer=base)
    assert (tmp_path / "given/tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


def test_the_adapter_of_a_run_that_saved_nothing_else(tmp_path: Path) -> None:
    """LlamaFactory#3573: `pytorch_model_fsdp_0` of a QLoRA run was given as an adapter: "Repo id must be …"."""
    a, b = numbers(4, 6), numbers(8, 4)
    adapter = {f"{PEFT}.lora_A.weight": a, f"{PEFT}.lora_B.weight": b}
    source = db.save(tmp_path / "checkpoint-9/pytorch_model_fsdp_0", {"model": adapter})
    assert "--lora-alpha" in str(refuse(source, tmp_path / "out").hint)
    write_json(source.parent / "adapter_config.json", {"peft_type": "LORA", "r": 4, "lora_alpha": 8})
    _, found = merge(source, tmp_path / "out")
    assert same(found, adapter)
    written = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"], written["target_modules"]) == (
        4,
        8,
        ["model.layers.0.self_attn.q_proj"],
    )


def test_base_and_adapter_of_one_run(tmp_path: Path) -> None:
    """axolotl#3294: merging LoRA failed with FSDP2."""
    base, a, b = numbers(8, 6), numbers(2, 6), numbers(8, 2)
    tensors = {
        f"{PEFT}.base_layer.weight": base,
        f"{PEFT}.lora_A.default.weight": a,
        f"{PEFT}.lora_B.default.weight": b,
    }
    source = db.save(tmp_path / "pytorch_model_fsdp_0", {"model": tensors})
    write_json(tmp_path / "config.json", TOY)
    write_json(tmp_path / "adapter_config.json", {"peft_type": "LORA", "r": 2, "lora_alpha": 4})
    name = "model.layers.0.self_attn.q_proj.weight"
    merge(source, tmp_path / "fused", fuse_lora=True)
    fused = np.frombuffer(read_tensors(tmp_path / "fused")[name].data, "<f4").reshape(8, 6)
    np.testing.assert_allclose(fused, base + 2 * (b @ a), rtol=1e-5)
    merge(source, tmp_path / "out")
    assert read_tensors(tmp_path / "out")[name].data == base.tobytes()
    assert len(read_tensors(tmp_path / "out/lora_adapter")) == 2


def test_the_files_of_optimizers_are_not_needed(tmp_path: Path) -> None:
    """torch#125740, llm-foundry#463: every rank asked for files of others, and optimizers were loaded whole."""
    weights = {"a.weight": numbers(6, 2)}
    writer = db.sharded(tmp_path / "ckpt", {f"model.{name}": array for name, array in weights.items()})
    writer.declare("optim.state.a.weight.exp_avg", (1 << 40,))
    writer.write("optim.state.a.weight.exp_avg", (0,), numbers(1), "__5_0.distcp")
    source = writer.finish()
    (source / "__5_0.distcp").unlink()
    write_json(source / "config.json", TOY)
    report, found = merge(source, tmp_path / "out", weights_only=True)
    assert same(found, {f"model.{name}": array for name, array in weights.items()})
    assert "optimizer states: 1 tensor, 4.4 TB, left out" in words(report)


def test_an_interrupted_save_is_called_one(tmp_path: Path) -> None:
    """Automodel PR#3261: a partial directory without any mark of what it is."""
    source = write_model(tmp_path / "step-10")
    (source / ".metadata").rename(source / ".metadata.tmp")
    error = refuse(source, tmp_path / "out")
    assert "there is .metadata.tmp, but no .metadata" in error.message
    assert "interrupted" in str(error.hint)


def test_several_steps_are_all_named(tmp_path: Path) -> None:
    """A run of Trainer keeps several checkpoints, none of which it calls the latest."""
    for step in (10, 200, 30):
        write_model(tmp_path / f"run/checkpoint-{step}/pytorch_model_fsdp_0")
    error = refuse(tmp_path / "run", tmp_path / "out")
    assert isinstance(error, NotACheckpointError)
    steps = [line.split("checkpoint-")[1].split("/")[0] for line in error.message.splitlines() if "checkpoint-" in line]
    assert steps == ["10", "30", "200"]


def test_metadata_that_nobody_unpickles(tmp_path: Path) -> None:
    """VeOmni#170: `.metadata` of another version of torch could not be loaded at all."""
    source = write_model(tmp_path / "ckpt")
    data = (source / ".metadata").read_bytes()
    moved = data.replace(b"torch.distributed.checkpoint.metadata", b"torch.distributed.checkpoint.nowhere_")
    assert moved != data
    (source / ".metadata").write_bytes(moved)
    assert merge(source, tmp_path / "out")[1] == truth("fsdp2_w4")
    (source / ".metadata").write_bytes(data[: len(data) // 2])
    assert isinstance(refuse(source, tmp_path / "no"), FormatError)
