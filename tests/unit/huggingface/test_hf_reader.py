"""What is recognised as a Hugging Face model, and what of it is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from assembled import ROOT, store, write_target
from unshard.checkpoint import Checkpoint
from unshard.dtypes import F32
from unshard.errors import NotACheckpointError
from unshard.formats.contract import Source
from unshard.formats.huggingface.reader import HuggingFace
from unshard.formats.huggingface.target import lay_out
from unshard.formats.huggingface.weights import find_weights
from unshard.model import Model
from unshard.options import MergeOptions

READER = HuggingFace()
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_model(directory: Path, *names: str, options: MergeOptions | None = None) -> None:
    tensors = store(directory.parent / f"{directory.name}.raw", dict.fromkeys(names, (F32, (4,))))
    source = Checkpoint("test", "test", {ROOT: directory.parent / f"{directory.name}.raw"}, tensors)
    write_target(lay_out(Model(tensors), source, options or MergeOptions(), ()), directory)


@pytest.mark.parametrize(
    ("names", "files", "index"),
    [
        (("model.safetensors", INDEX, *SHARDS, "pytorch_model.bin"), ("model.safetensors",), None),
        ((INDEX, *SHARDS, "pytorch_model.bin"), (), INDEX),
        ((*SHARDS, "pytorch_model.bin"), SHARDS, None),
        (("pytorch_model.bin", "pytorch_model.bin.index.json"), ("pytorch_model.bin",), None),
        (("pytorch_model.bin.index.json", "adapter_model.safetensors"), (), "pytorch_model.bin.index.json"),
        (("adapter_model.bin", "adapter_model.safetensors"), ("adapter_model.safetensors",), None),
        (("adapter_model.bin",), ("adapter_model.bin",), None),
        (("b.safetensors", "a.safetensors"), ("a.safetensors", "b.safetensors"), None),
    ],
)
def test_weights_are_found_in_the_order_of_transformers(
    names: tuple[str, ...], files: tuple[str, ...], index: str | None
) -> None:
    found = find_weights(names)
    assert found is not None
    assert (found.files, found.index) == (files, index)


@pytest.mark.parametrize(
    "names",
    [
        ("config.json", "tokenizer.json"),
        ("model_world_size_1_rank_0.pt",),
        ("pytorch_model_fsdp_0_rank0.bin", "optimizer.bin"),
        ("shard-00001-model-00001-of-00001.safetensors",),
    ],
)
def test_what_is_no_model(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert READER.detect(tmp_path) is None
    with pytest.raises(NotACheckpointError):
        READER.read(Source(tmp_path))


def test_what_is_said_of_a_model(tmp_path: Path) -> None:
    write_model(tmp_path / "one", "a")
    write_model(tmp_path / "two", "a", "b", options=MergeOptions(max_shard_size=16))
    assert READER.detect(tmp_path / "one") == "a Hugging Face model, model.safetensors"
    assert READER.detect(tmp_path / "two") == "a Hugging Face model, safetensors files with an index"
    assert READER.detect(tmp_path / "one/model.safetensors") == "a safetensors file"
    assert READER.detect(tmp_path / "one.raw/raw") is None
    assert READER.detect(tmp_path / "nowhere") is None


def test_a_lone_file(tmp_path: Path) -> None:
    write_model(tmp_path / "one", "a")
    found = READER.read(Source(tmp_path / "one/model.safetensors"))
    assert (list(found.tensors), found.config, found.assets) == (["a"], None, ())
    assert not found.problems


def test_a_lone_shard_is_not_taken_for_a_model(tmp_path: Path) -> None:
    write_model(tmp_path / "two", "a", "b", options=MergeOptions(max_shard_size=16))
    found = READER.read(Source(tmp_path / "two" / SHARDS[0]))
    assert "1 of 2 weights files are missing" in found.problems[0].message


def test_files_may_lie_under_several_roots(tmp_path: Path) -> None:
    write_model(tmp_path / "two", "a", "b", options=MergeOptions(max_shard_size=16))
    (tmp_path / "other").mkdir()
    (tmp_path / "two" / SHARDS[1]).rename(tmp_path / "other" / SHARDS[1])
    assert READER.read(Source(tmp_path / "two")).problems
    found = READER.read(Source(tmp_path / "two", also=(tmp_path / "other",)))
    assert not found.problems
    assert {tensor.chunks[0].extent.file.root for tensor in found.tensors.values()} == {"source", "also1"}


def test_weights_that_are_not_the_model_are_named(tmp_path: Path) -> None:
    write_model(tmp_path / "two", "a", "b", options=MergeOptions(max_shard_size=16))
    stale = ("model-00001-of-00009.safetensors", "pytorch_model.bin")
    for name in (*stale, "training_args.bin"):
        (tmp_path / "two" / name).touch()
    found = READER.read(Source(tmp_path / "two"))
    assert not found.problems
    (note,) = found.notes
    assert note.text == f"not read, as transformers does not read them either: {', '.join(stale)}"


def test_a_malformed_config_is_a_problem_and_not_an_absent_config(tmp_path: Path) -> None:
    write_model(tmp_path / "one", "a")
    (tmp_path / "one/config.json").write_text("{")
    found = READER.read(Source(tmp_path / "one"))
    assert found.config is None
    assert "malformed JSON" in found.problems[0].message
    assert list(found.tensors) == ["a"]


def test_an_adapter_and_its_config(tmp_path: Path) -> None:
    write_model(tmp_path / "one", "a")
    (tmp_path / "one/model.safetensors").rename(tmp_path / "one/adapter_model.safetensors")
    assert READER.read(Source(tmp_path / "one")).adapter is None
    (tmp_path / "one/adapter_config.json").write_text('{"r": 4}')
    found = READER.read(Source(tmp_path / "one"))
    assert found.adapter == {"r": 4}
    assert found.title == "A PEFT adapter, adapter_model.safetensors"
    (tmp_path / "one/adapter_config.json").write_text("[")
    assert "adapter_config.json" in READER.read(Source(tmp_path / "one")).problems[0].message
