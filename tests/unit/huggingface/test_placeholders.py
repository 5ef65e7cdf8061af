"""trl#4416, peft#2892, accelerate#3508: what ZeRO-3 leaves where parameters were saved without being gathered."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import unshard
from golden.tensor_files import assert_equal, read_tensors
from golden_set import COMMITTED
from hf_shard_bytes import write_file
from unshard.errors import IncompleteError

ZERO_3 = COMMITTED / "deepspeed_z3_lora"
LORA = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def write(place: Path, shapes: dict[str, tuple[int, ...]], name: str = "adapter_model.safetensors") -> Path:
    """A file of tensors without bytes, and what makes an adapter of it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    header |= {key: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for key, shape in shapes.items()}
    write_file(place / name, header, b"")
    (place / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    return place


def refuse(source: Path, output: Path) -> IncompleteError:
    with pytest.raises(IncompleteError) as caught:
        unshard.merge(source, output)
    assert "ZeRO-3 leaves such placeholders" in caught.value.message
    assert not output.exists()
    return caught.value


def test_an_adapter_of_40_bytes_is_explained(tmp_path: Path) -> None:
    place = write(tmp_path / "adapter", {})
    header = b'{"__metadata__":{"format":"pt"}}'
    assert (place / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header) == 40
    error = refuse(place, tmp_path / "out")
    assert "adapter_model.safetensors holds no tensor" in error.message
    assert str(error.hint).endswith("unshard merge global_stepN OUT --adapter-only")


def test_tensors_of_shape_0_are_explained_and_named(tmp_path: Path) -> None:
    place = write(tmp_path / "adapter", {LORA: (0,), LORA.replace("_A", "_B"): (0,)})
    error = refuse(place, tmp_path / "out")
    assert f"2 of 2 tensors hold nothing, in shape [0]: {LORA}" in error.message


def test_a_model_of_placeholders_is_explained_whatever_buffers_it_has(tmp_path: Path) -> None:
    header = {
        "model.norm.weight": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]},
        "model.scale": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    }
    write_file(tmp_path / "model" / "model.safetensors", {**header, "__metadata__": {"format": "pt"}}, bytes(8))
    error = refuse(tmp_path / "model", tmp_path / "out")
    assert "1 of 2 tensors hold nothing, in shape [0]: model.norm.weight" in error.message
    assert "--adapter-only" not in str(error.hint)


def test_a_buffer_without_elements_is_a_buffer(tmp_path: Path) -> None:
    header = {"seen": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "__metadata__": {"format": "pt"}}
    write_file(tmp_path / "model" / "model.safetensors", header, b"")
    unshard.merge(tmp_path / "model", tmp_path / "out", weights_only=True)
    assert read_tensors(tmp_path / "out")["seen"].shape == (0,)


@pytest.mark.parametrize(
    ("checkpoint", "adapter"),
    [("adapter", "adapter"), ("run/checkpoint-1", "run"), ("run", "run/final"), ("run/checkpoint-200", "run")],
)
def test_the_hint_leads_to_the_shards_that_lie_near(checkpoint: str, adapter: str, tmp_path: Path) -> None:
    """The tag's directory lies without a `latest` beside the adapter, below it, or above: it is not found by itself."""
    step = tmp_path / checkpoint / "global_step1"
    shutil.copytree(ZERO_3 / "ckpt" / "global_step1", step)
    shutil.copytree(ZERO_3 / "ckpt" / "global_step1", tmp_path / "run" / "checkpoint-3" / "global_step1")
    if checkpoint == "run/checkpoint-1":
        shutil.rmtree(tmp_path / "run" / "checkpoint-3")
    error = refuse(write(tmp_path / adapter, {LORA: (0,)}), tmp_path / "out")
    assert str(error.hint).endswith(f"unshard merge {step} OUT --adapter-only")


def test_beside_its_placeholders_the_adapter_is_rebuilt_from_the_shards(tmp_path: Path) -> None:
    """As Trainer saves it: `checkpoint-N` with an empty adapter, its config, and DeepSpeed's own directory."""
    place = Path(shutil.copytree(ZERO_3 / "ckpt", tmp_path / "checkpoint-1"))
    recorded = json.loads((place / "adapter_config.json").read_text())
    write(place, {})
    (place / "adapter_config.json").write_text(json.dumps(recorded))
    unshard.merge(place, tmp_path / "out", adapter_only=True)
    assert_equal(read_tensors(tmp_path / "out"), read_tensors(ZERO_3 / "truth_adapter"))
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"]) == (recorded["r"], recorded["lora_alpha"])
    report = unshard.merge(place, tmp_path / "both")
    assert_equal(read_tensors(tmp_path / "both" / "lora_adapter"), read_tensors(ZERO_3 / "truth_adapter"))
    assert_equal(read_tensors(tmp_path / "both"), read_tensors(ZERO_3 / "truth"))
    assert report.weights == "master"
