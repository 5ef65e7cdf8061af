"""The Python API: a mapping of lazy tensors, and functions that return what they found."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import unshard
from unshard.dtypes import DTYPES
from unshard.report.events import Event, PhaseFinished


@pytest.fixture
def case(committed_golden: Path) -> Path:
    return committed_golden / "fsdp2_tp_names"


@pytest.fixture
def truth(case: Path) -> dict[str, np.ndarray]:
    return load_file(case / "truth" / "model.safetensors")


class TestOpen:
    def test_is_a_mapping_of_stored_names(self, case: Path, truth: dict[str, np.ndarray]) -> None:
        checkpoint = unshard.open(case / "ckpt")
        assert set(checkpoint) == set(truth)
        assert len(checkpoint) == len(truth)
        assert "model.norm.weight" in checkpoint
        assert checkpoint.get("nothing") is None
        with pytest.raises(KeyError):
            checkpoint["nothing"]
        assert checkpoint.config is not None
        assert checkpoint.config["model_type"] == "llama"

    def test_reads_every_tensor_bit_for_bit(self, case: Path, truth: dict[str, np.ndarray]) -> None:
        for name, tensor in unshard.open(str(case / "ckpt")).items():
            found = tensor.numpy()
            assert (found.dtype, found.shape) == (truth[name].dtype, truth[name].shape)
            assert found.tobytes() == truth[name].tobytes(), name

    @pytest.mark.parametrize(
        "key",
        [
            0,
            -1,
            slice(3, 17),
            slice(-5, None),
            slice(None, None, 3),
            slice(8, 3),
            (slice(2, 9), slice(1, None, 2)),
            (Ellipsis, 0),
            (0, Ellipsis),
            (Ellipsis, slice(2, 4)),
            (slice(None), -2),
            (4, 5),
            Ellipsis,
            (),
        ],
        ids=str,
    )
    def test_slices_as_numpy_does(self, case: Path, truth: dict[str, np.ndarray], key: object) -> None:
        name = "model.layers.0.mlp.gate_proj.weight"
        found = unshard.open(case / "ckpt")[name][key]
        expected = truth[name][key]
        assert found.shape == expected.shape
        np.testing.assert_array_equal(found.numpy(), expected)

    def test_slices_of_slices(self, case: Path, truth: dict[str, np.ndarray]) -> None:
        name = "model.embed_tokens.weight"
        found = unshard.open(case / "ckpt")[name][5:40][::2][-3:, 1]
        np.testing.assert_array_equal(found.numpy(), truth[name][5:40][::2][-3:, 1])

    @pytest.mark.parametrize("key", [10**6, -(10**6), (0, 0, 0), (Ellipsis, Ellipsis), slice(None, None, -1)], ids=str)
    def test_refuses_indices_that_lead_nowhere(self, case: Path, key: object) -> None:
        with pytest.raises(IndexError):
            unshard.open(case / "ckpt")["model.embed_tokens.weight"][key]

    @pytest.mark.parametrize("key", [None, "x", 1.5, [0, 1]], ids=str)
    def test_refuses_keys_that_are_no_indices(self, case: Path, key: object) -> None:
        with pytest.raises(TypeError):
            unshard.open(case / "ckpt")["model.embed_tokens.weight"][key]

    def test_iterates_over_rows(self, case: Path, truth: dict[str, np.ndarray]) -> None:
        rows = [row.numpy() for row in unshard.open(case / "ckpt")["model.embed_tokens.weight"]]
        np.testing.assert_array_equal(np.stack(rows), truth["model.embed_tokens.weight"])

    def test_arrays_are_made_by_numpy_itself(self, case: Path, truth: dict[str, np.ndarray]) -> None:
        tensor = unshard.open(case / "ckpt")["model.norm.weight"]
        np.testing.assert_array_equal(np.asarray(tensor), truth["model.norm.weight"])
        assert np.asarray(tensor, dtype=np.float64).dtype == np.float64
        assert repr(tensor).startswith("LazyTensor(model.norm.weight, F32, [")

    def test_missing_ranks_are_raised(self, case: Path, tmp_path: Path) -> None:
        shutil.copytree(case / "ckpt", tmp_path / "ckpt")
        next((tmp_path / "ckpt").rglob("*rank_1.pt")).unlink()
        with pytest.raises(unshard.UnshardError, match="rank 1"):
            unshard.open(tmp_path / "ckpt")

    def test_nothing_there_is_raised(self, tmp_path: Path) -> None:
        with pytest.raises(unshard.UnshardError, match="does not exist") as caught:
            unshard.open(tmp_path / "nothing")
        assert caught.value.exit_code == 3
        assert caught.value.hint


def _write_file_of_every_type(path: Path) -> dict[str, bytes]:
    """A safetensors file with a small tensor of each element type, and one without elements."""
    contents: dict[str, bytes] = {}
    header: dict[str, object] = {}
    offset = 0
    for dtype in sorted(DTYPES, key=lambda dtype: -dtype.itemsize):
        for name, items in ((dtype.name, 6), (f"{dtype.name}.empty", 0)):
            data = bytes(range(items * dtype.itemsize)) if dtype.name != "BOOL" else bytes([0, 1] * (items // 2))
            shape = [2, items // 2 * dtype.packed]
            header[name] = {"dtype": dtype.name, "shape": shape, "data_offsets": [offset, offset + len(data)]}
            contents[name], offset = data, offset + len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(contents.values()))
    return contents


class TestTypes:
    def test_numpy_gives_the_bytes_of_every_type(self, tmp_path: Path) -> None:
        contents = _write_file_of_every_type(tmp_path / "model.safetensors")
        checkpoint = unshard.open(tmp_path / "model.safetensors")
        assert {name: tensor.numpy().tobytes() for name, tensor in checkpoint.items()} == contents

    @pytest.mark.torch
    def test_torch_gives_the_bytes_of_every_type(self, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch")
        contents = _write_file_of_every_type(tmp_path / "model.safetensors")
        for name, tensor in unshard.open(tmp_path / "model.safetensors").items():
            found = tensor.torch()
            wanted = next(dtype for dtype in DTYPES if dtype.name == name.partition(".")[0])
            assert found.dtype == getattr(torch, wanted.torch_name)
            assert tuple(found.shape) == tensor.shape
            assert bytes(found.reshape(-1).view(torch.uint8).tolist()) == contents[name]

    @pytest.mark.torch
    def test_torch_tensors_are_writable_scalars_and_slices(self, case: Path) -> None:
        torch = pytest.importorskip("torch")
        tensor = unshard.open(case / "ckpt")["model.norm.weight"]
        assert tensor[0].torch().shape == ()
        assert torch.equal(tensor[2:4].torch(), tensor.torch()[2:4])
        tensor.torch().zero_()

    def test_torch_that_is_not_installed_is_named(self, case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", None)
        with pytest.raises(unshard.UnshardError, match="PyTorch is not installed"):
            unshard.open(case / "ckpt")["model.norm.weight"].torch()


class TestMerge:
    def test_returns_the_report(self, case: Path, truth: dict[str, np.ndarray], tmp_path: Path) -> None:
        events: list[Event] = []
        report = unshard.merge(case / "ckpt", tmp_path / "out", sink=events.append)
        assert report.family == "LlamaForCausalLM"
        assert report.tensors == len(truth)
        assert report.parameters == sum(array.size for array in truth.values())
        assert report.size == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
        assert dict(report.files) == {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
        assert report.verification.compared > 0
        assert [event.phase for event in events if isinstance(event, PhaseFinished)] == ["write", "verify"]
        assert json.loads(json.dumps(report.to_json()))["tensors"] == len(truth)

    def test_takes_strings_for_paths_and_one_path_for_several(self, committed_golden: Path, tmp_path: Path) -> None:
        nodes = committed_golden / "layout_nodes" / "ckpt"
        first, *others = sorted(str(place) for place in nodes.iterdir() if place.is_dir())
        report = unshard.merge(first, str(tmp_path / "out"), also=others[0] if len(others) == 1 else others)
        assert report.tensors > 0

    def test_says_which_word_it_does_not_know(self, case: Path, tmp_path: Path) -> None:
        with pytest.raises(unshard.UnshardError, match="dtype is 'bfloat16', which is none of keep, bf16, fp16, fp32"):
            unshard.merge(case / "ckpt", tmp_path / "out", dtype="bfloat16")
        with pytest.raises(TypeError, match="colour"):
            unshard.merge(case / "ckpt", tmp_path / "out", colour="red")
        assert not (tmp_path / "out").exists()

    def test_errors_tell_their_parts(self, case: Path, tmp_path: Path) -> None:
        shutil.copytree(case / "ckpt", tmp_path / "ckpt")
        for file in (tmp_path / "ckpt").rglob("*rank_[12].pt"):
            file.write_bytes(file.read_bytes()[:1000])
        with pytest.raises(unshard.UnshardError) as caught:
            unshard.merge(tmp_path / "ckpt", tmp_path / "out")
        assert len(caught.value.problems) >= 2
        assert all(problem.message in str(caught.value) for problem in caught.value.problems)

    def test_plan_moves_nothing(self, case: Path, tmp_path: Path) -> None:
        plan = unshard.plan(case / "ckpt", dtype="bf16")
        assert plan.size == sum(file.size for file in plan.files)
        assert "model.safetensors" in [file.path for file in plan.files]
        assert not list(tmp_path.iterdir())


class TestVerify:
    def test_structure_alone(self, case: Path) -> None:
        verdict = unshard.verify(case / "truth")
        assert verdict.holds
        assert verdict.comparison is None
        assert any("contents" in sentence for sentence in verdict.unproven)

    def test_against_its_source(self, case: Path) -> None:
        verdict = unshard.verify(case / "truth", case / "ckpt")
        assert verdict.holds
        assert verdict.comparison is not None
        assert all(tensor.identical for tensor in verdict.comparison.tensors)

    def test_within_a_tolerance(self, case: Path, tmp_path: Path) -> None:
        unshard.merge(case / "ckpt", tmp_path / "out", dtype="bf16")
        assert not unshard.verify(tmp_path / "out", case / "truth").holds
        assert unshard.verify(tmp_path / "out", case / "truth", atol=1e-2).holds
        assert unshard.verify(tmp_path / "out", case / "truth", min_cosine=0.999).holds
        assert not unshard.verify(tmp_path / "out", case / "truth", atol=1e-9).holds
        assert unshard.verify(tmp_path / "out", case / "ckpt", dtype="bf16").holds


def test_importing_loads_no_numpy() -> None:
    code = (
        "import sys, unshard; sys.exit(bool({'numpy', 'ml_dtypes', 'rich', 'safetensors', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
