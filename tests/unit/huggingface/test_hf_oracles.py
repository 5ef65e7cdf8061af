"""What torch, transformers and peft make of the directories that are laid out here."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assembled import ROOT, store, write_target
from unshard.checkpoint import Checkpoint
from unshard.dtypes import DTYPES
from unshard.formats.contract import Source
from unshard.formats.huggingface.reader import HuggingFace
from unshard.formats.huggingface.target import lay_out
from unshard.model import Adapter, Model
from unshard.options import MergeOptions

pytestmark = pytest.mark.torch
SHAPES = ((3, 5), (), (0, 4), (1,))


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as transformers saves it."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    directory = tmp_path_factory.mktemp("qwen2")
    transformers.Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def rewrite(source: Path, output: Path, options: MergeOptions) -> None:
    found = HuggingFace().read(Source(source))
    assert not found.problems
    write_target(lay_out(Model(found.tensors), found, options, ()), output)


@pytest.mark.parametrize("mapped", [False, True])
def test_torch_loads_every_dtype_and_shape(tmp_path: Path, mapped: bool) -> None:
    torch = pytest.importorskip("torch")
    entries = {f"{dtype} é\n雪 {shape}": (dtype, shape) for dtype in DTYPES for shape in SHAPES}
    tensors = store(tmp_path / "in", entries)
    source = Checkpoint("test", "test", {ROOT: tmp_path / "in"}, tensors)
    write_target(lay_out(Model(tensors), source, MergeOptions(container="bin"), ()), tmp_path / "out")
    raw = (tmp_path / "in/raw").read_bytes()
    state = torch.load(tmp_path / "out/pytorch_model.bin", weights_only=True, mmap=mapped)
    assert list(state) == list(entries)
    for name, (dtype, shape) in entries.items():
        assert (state[name].dtype, tuple(state[name].shape)) == (getattr(torch, dtype.torch_name), shape)
        if prod(shape):
            start = tensors[name].chunks[0].extent.offset
            expected = raw[start : start + prod(shape) * dtype.itemsize]
            assert state[name].reshape(-1).view(torch.uint8).numpy().tobytes() == expected


@pytest.mark.parametrize("container", ["safetensors", "bin"])
@pytest.mark.parametrize("limit", [5_000_000_000, 20_000])
@pytest.mark.parametrize("dtype", ["keep", "fp32"])
def test_transformers_loads_a_model(qwen2: Path, tmp_path: Path, container: Any, limit: int, dtype: Any) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    rewrite(qwen2, tmp_path / "out", MergeOptions(container=container, max_shard_size=limit, dtype=dtype))
    expected = transformers.AutoModelForCausalLM.from_pretrained(qwen2)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    assert loaded.dtype == (torch.float32 if dtype == "fp32" else torch.bfloat16)
    state = loaded.state_dict()
    for name, value in expected.state_dict().items():
        assert torch.equal(state[name], value.to(loaded.dtype)), name


def test_a_model_in_one_file_is_byte_for_byte_that_of_transformers(qwen2: Path, tmp_path: Path) -> None:
    rewrite(qwen2, tmp_path / "out", MergeOptions())
    for path in qwen2.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_model_in_several_files_is_cut_as_transformers_cuts_it(qwen2: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(qwen2)
    model.save_pretrained(tmp_path / "expected", max_shard_size=20_000)
    found = HuggingFace().read(Source(qwen2))
    in_order = {name: found.tensors[name] for name in sorted(found.tensors)}  # transformers 5 cuts in this order
    write_target(lay_out(Model(in_order), found, MergeOptions(max_shard_size=20_000), ()), tmp_path / "out")
    assert len(list((tmp_path / "expected").iterdir())) > 4
    for path in (tmp_path / "expected").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("container", ["pytorch_model.bin", "safetensors"])
def test_what_torch_and_transformers_save_is_read(qwen2: Path, tmp_path: Path, container: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(qwen2)
    if container == "safetensors":
        model.save_pretrained(tmp_path, max_shard_size=20_000)
    else:
        torch.save(model.state_dict(), tmp_path / container)
    found = HuggingFace().read(Source(tmp_path))
    assert not found.problems
    for name, tensor in found.tensors.items():
        (chunk,) = tensor.chunks
        data = (tmp_path / chunk.extent.file.path).read_bytes()[chunk.extent.offset :][: tensor.size_in_bytes]
        assert np.array_equal(np.frombuffer(data, np.uint16), model.state_dict()[name].reshape(-1).view(torch.uint16))


def test_peft_loads_an_adapter(qwen2: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")

    def base() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(qwen2)

    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base(), config)
    model.save_pretrained(tmp_path / "expected")
    found = HuggingFace().read(Source(tmp_path / "expected"))
    assert found.adapter is not None
    adapter = Adapter("default", found.tensors, found.adapter)
    write_target(lay_out(Model({}), found, MergeOptions(), [adapter]), tmp_path / "out")
    name = "adapter_model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())
