"""The layout of whole output directories."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from assembled import ROOT, gather, store, write_target
from unshard.checkpoint import Checkpoint, Note
from unshard.dtypes import BF16, BOOL, C64, F4, F8_E4M3, F16, F32, F64, I64, DType
from unshard.errors import ModelError, OutputError
from unshard.formats.contract import Source
from unshard.formats.huggingface.assets import find_assets
from unshard.formats.huggingface.reader import HuggingFace
from unshard.formats.huggingface.target import lay_out
from unshard.model import Adapter, Model
from unshard.options import MergeOptions
from unshard.target import Claim, Target
from unshard.tensors import Tensor

MIXED = {"w": (BF16, (6, 5)), "norm": (F32, (3,)), "ids": (I64, (2,)), "mask": (BOOL, (3, 1)), "scalar": (F32, ())}


def make_source(directory: Path, entries: Mapping[str, tuple[DType, tuple[int, ...]]], **files: str) -> Checkpoint:
    """Tensors in a raw file, and side files: dots are written as double underscores."""
    tensors = store(directory, entries)
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(content)
    config, assets = find_assets(directory, ROOT)
    return Checkpoint("test", "test", {ROOT: directory}, tensors, config, assets)


def adapter(source: Checkpoint, name: str = "default", **config: Any) -> Adapter:
    return Adapter(name, source.tensors, {"peft_type": "LORA", "r": 4, **config})


def files_of(target: Target) -> list[str]:
    return sorted(file.path for file in target.files)


def check_contents(output: Path, tensors: Mapping[str, Tensor], roots: Mapping[str, Path]) -> Checkpoint:
    """The directory at `output` holds exactly these tensors, bit for bit."""
    found = HuggingFace().read(Source(output))
    assert not found.problems
    assert found.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        read = found.tensors[name]
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape), name
        assert gather(read, found.roots) == gather(tensor, roots), name
    return found


def test_one_file_and_the_side_files(tmp_path: Path) -> None:
    source = make_source(tmp_path / "in", MIXED, config__json="{}", tokenizer__json="", LICENSE="free")
    target = lay_out(Model(source.tensors), source, MergeOptions(), ())
    write_target(target, tmp_path / "out")
    assert [file.path for file in target.files if file.last] == ["model.safetensors"]
    assert target.files[-1].last
    check_contents(tmp_path / "out", source.tensors, source.roots)
    for name in ("config.json", "tokenizer.json", "LICENSE"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()
    assert [value.name for value in target.weights] == ["ids", "norm", "scalar", "w", "mask"]


def test_a_side_file_that_is_a_link_out_of_the_checkpoint_is_told(tmp_path: Path) -> None:
    """An archive from a stranger may hold `tokenizer.json -> ~/.ssh/id_rsa`, and its merge be uploaded."""
    (tmp_path / "in").mkdir()
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "in/tokenizer.json").symlink_to("../secret")
    source = make_source(tmp_path / "in", MIXED, config__json="{}")
    (note,) = lay_out(Model(source.tensors), source, MergeOptions(), ()).notes
    assert note.level == "warning"
    assert f"tokenizer.json is {tmp_path / 'secret'}" in note.text


@pytest.mark.parametrize(("container", "stem"), [("safetensors", "model"), ("bin", "pytorch_model")])
def test_several_files_and_their_index(tmp_path: Path, container: Any, stem: str) -> None:
    source = make_source(tmp_path / "in", MIXED | {"packed": (F4, (2, 3)), "none": (F16, (0, 7)), "z": (C64, (2,))})
    options = MergeOptions(container=container, max_shard_size=40)
    target = lay_out(Model(source.tensors), source, options, ())
    write_target(target, tmp_path / "out")
    assert target.files[-1].last
    assert target.files[-1].path == f"{stem}.{container}.index.json"
    assert [file.last for file in target.files].count(True) == 1
    text = (tmp_path / "out" / target.files[-1].path).read_text()
    index = json.loads(text)
    assert text == json.dumps(index, indent=2, sort_keys=True) + "\n"
    assert index["metadata"] == {
        "total_parameters": 30 + 3 + 2 + 3 + 1 + 12 + 0 + 2,
        "total_size": 60 + 12 + 16 + 3 + 4 + 6 + 0 + 16,
    }
    assert index["weight_map"]["w"] == f"{stem}-00001-of-00003.{container}"
    check_contents(tmp_path / "out", source.tensors, source.roots)


def test_a_cast_rounds_floats_only_and_is_seen_in_the_config(tmp_path: Path) -> None:
    entries = MIXED | {"double": (F64, (2,)), "fp8": (F8_E4M3, (4,))}
    source = make_source(tmp_path / "in", entries, config__json='{"dtype": "bfloat16", "quantization_config": {}}')
    target = lay_out(Model(source.tensors), source, MergeOptions(dtype="fp16"), ())
    write_target(target, tmp_path / "out")
    dtypes = {"w": F16, "norm": F16, "scalar": F16, "double": F16, "ids": I64, "mask": BOOL, "fp8": F8_E4M3}
    expected = {name: replace(tensor, dtype=dtypes[name]) for name, tensor in source.tensors.items()}
    check_contents(tmp_path / "out", expected, source.roots)
    assert (tmp_path / "out/config.json").read_text() == '{"dtype": "float16", "quantization_config": {}}'
    texts = [note.text for note in target.notes]
    assert "1 tensors hold quantised floats and were not cast" in texts
    assert "config.json: dtype is float16, as the weights are; it said bfloat16" in texts


def test_what_the_model_knows_is_passed_on(tmp_path: Path) -> None:
    source = make_source(tmp_path / "in", MIXED, config__json='{"tie_word_embeddings": true}')
    claim = Claim(source.tensors["w"], source.tensors["w"], "equal to itself")
    changes = {"tie_word_embeddings": False}
    model = Model({"renamed": source.tensors["w"]}, claims=(claim,), notes=(Note("said"),), config_changes=changes)
    target = lay_out(model, source, MergeOptions(), ())
    write_target(target, tmp_path / "out")
    assert (target.claims, target.notes) == ((claim,), (Note("said"),))
    assert (tmp_path / "out/config.json").read_text() == '{"tie_word_embeddings": false}'
    check_contents(tmp_path / "out", {"renamed": source.tensors["w"]}, source.roots)
    assert [value.name for value in target.weights] == ["renamed"]


def test_a_reference_layout_is_followed(tmp_path: Path) -> None:
    source = make_source(tmp_path / "in", MIXED)
    layout = dict.fromkeys(MIXED, "model-00002-of-00009.safetensors") | {"w": "model-00001-of-00009.safetensors"}
    target = lay_out(Model(source.tensors, layout=layout), source, MergeOptions(max_shard_size=1), ())
    write_target(target, tmp_path / "out")
    assert files_of(target) == [*sorted(set(layout.values())), "model.safetensors.index.json"]
    check_contents(tmp_path / "out", source.tensors, source.roots)


def test_adapters_lie_beside_the_model(tmp_path: Path) -> None:
    source = make_source(tmp_path / "in", {"a": (F32, (2, 2))}, config__json="{}")
    adapters = [adapter(source, bias="none"), adapter(source, "second one")]
    target = lay_out(Model(source.tensors), source, MergeOptions(dtype="bf16"), adapters)
    write_target(target, tmp_path / "out")
    assert [file.path for file in target.files if file.last] == ["model.safetensors"]
    found = check_contents(tmp_path / "out/lora_adapter", {"a": replace(source.tensors["a"], dtype=BF16)}, source.roots)
    assert found.adapter == {"peft_type": "LORA", "r": 4, "bias": "none"}
    assert files_of(target) == [
        "config.json",
        "lora_adapter/adapter_config.json",
        "lora_adapter/adapter_model.safetensors",
        "lora_adapter/second one/adapter_config.json",
        "lora_adapter/second one/adapter_model.safetensors",
        "model.safetensors",
    ]


def test_an_adapter_alone_is_the_directory_itself(tmp_path: Path) -> None:
    source = make_source(tmp_path / "in", {"a": (F32, (2,))}, config__json="{}", tokenizer__json="{}", LICENSE="")
    target = lay_out(Model({}), source, MergeOptions(), [adapter(source)])
    assert files_of(target) == ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"]
    assert target.files[-1].path == "adapter_model.safetensors"
    assert target.files[-1].last


@pytest.mark.parametrize("name", ["..", "a/b", "", ".", "a\\b", "a\n", "a."])
def test_an_adapter_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    source = make_source(tmp_path / "in", {"a": (F32, (2,))})
    with pytest.raises(ModelError, match="cannot be a directory"):
        lay_out(Model({}), source, MergeOptions(), [adapter(source, name)])


def test_nothing_to_write_and_files_of_one_name_are_refused(tmp_path: Path) -> None:
    source = make_source(tmp_path / "in", {"a": (F32, (2,))}, config__json="{}")
    with pytest.raises(ModelError, match="no tensors"):
        lay_out(Model({}), source, MergeOptions(), ())
    twice = replace(source, assets=source.assets * 2)
    with pytest.raises(OutputError, match=r"config\.json"):
        lay_out(Model(source.tensors), twice, MergeOptions(), ())


@pytest.mark.parametrize("container", ["safetensors", "bin"])
@pytest.mark.parametrize("name", ["\ud800"])
def test_a_name_that_no_file_can_hold_is_refused(tmp_path: Path, container: Any, name: str) -> None:
    source = make_source(tmp_path / "in", {"a": (F32, (2,))})
    with pytest.raises(ModelError, match="cannot be a tensor's name"):
        lay_out(Model({name: source.tensors["a"]}), source, MergeOptions(container=container), ())
