"""Folders of a universal checkpoint that hold anything but a parameter, under any name, of any claimed shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import torch_bytes as opcodes
from deepspeed_bytes import Job, Saved, size, weights
from unshard.cli import main
from unshard.errors import FormatError
from unshard.formats.contract import Source
from unshard.formats.deepspeed import DeepSpeedUniversal

MASTER = np.arange(6, dtype=np.float32).reshape(2, 3)


def write(directory: Path, shapes: dict[str, Any] | None = None) -> Path:
    """A universal checkpoint of one parameter `a`; returns the file of its master."""
    job = Job(2, 1, [weights({"a": (2, 3)})])
    states = job.files()["mp_rank_00_model_states.pt"]
    if shapes is not None:
        states.content["param_shapes"] = [{name: size(shape) for name, shape in shapes.items()}]
        states.content["module"] = {}
    directory.mkdir(exist_ok=True)
    states.write(directory / "mp_rank_00_model_states.pt")
    file = directory / "zero" / "a" / "fp32.pt"
    file.parent.mkdir(parents=True)
    Saved({"param": MASTER, "cat_dim": 0}).write(file)
    return file


def problems(directory: Path) -> str:
    return "\n".join(str(problem) for problem in DeepSpeedUniversal().read(Source(directory)).problems)


@pytest.mark.parametrize(
    "content", [{}, {"param": None}, {"param": [MASTER]}, {"param": {"param": MASTER}}, {"a": MASTER}]
)
def test_no_parameter(content: dict[str, Any], tmp_path: Path) -> None:
    Saved(content).write(write(tmp_path))
    assert "zero/a/fp32.pt: holds a dict of" in problems(tmp_path)


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", opcodes.finish(b"N"), b"\0" * 100])
def test_no_torch_file(data: bytes, tmp_path: Path) -> None:
    write(tmp_path).write_bytes(data)
    assert "zero/a/fp32.pt: " in problems(tmp_path)


def test_nothing_is_called(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    call = opcodes.call(opcodes.named("os", "mkdir"), opcodes.text(str(victim)))
    Saved({"param": MASTER, "sub_param_shape": call}).write(write(tmp_path))
    assert problems(tmp_path) == ""
    assert not victim.exists()


@pytest.mark.parametrize("shape", [(1 << 30, 1 << 30), (6,), (), (0, 1 << 60), (2, 3, 1)])
def test_shapes_that_are_claimed(shape: tuple[int, ...], tmp_path: Path) -> None:
    write(tmp_path, {"a": shape})
    assert f"a: [2, 3], but {list(shape)} in the model states" in problems(tmp_path)


@pytest.mark.parametrize("shape", [(1 << 31, 1 << 30), (0, 1 << 61), (-1,)])
def test_shapes_of_no_tensor(shape: tuple[int, ...], tmp_path: Path) -> None:
    write(tmp_path, {"a": shape})
    with pytest.raises(FormatError, match="an entry that is no shape"):
        problems(tmp_path)


@pytest.mark.parametrize("content", [{"vocab_tensor": True}, {"vocab_tensor": 1}])
def test_a_vocabulary_without_rows(content: dict[str, Any], tmp_path: Path) -> None:
    Saved({"param": np.zeros((), np.float32), **content}).write(write(tmp_path))
    assert "a: [], but [2, 3] in the model states" in problems(tmp_path)


def test_a_vocabulary_that_is_a_scalar(tmp_path: Path) -> None:
    Saved({"param": np.zeros((), np.float32), "vocab_tensor": True}).write(write(tmp_path, {"a": ()}))
    assert problems(tmp_path) == ""


def test_names_cannot_speak_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    (tmp_path / "zero" / "\x1b[2Jb\n").mkdir()
    assert "zero/ has folders of parameters that the model states do not know" in problems(tmp_path)
    main(["inspect", str(tmp_path)])
    assert "\x1b[2J" not in "".join(capsys.readouterr())


def test_names_of_parameters_lead_nowhere_else(tmp_path: Path) -> None:
    """A name is looked up among the folders that are there; it never makes a path."""
    Saved({"param": MASTER}).write(tmp_path / "fp32.pt")
    write(tmp_path / "run", {"../..": (2, 3), "a": (2, 3)})
    assert "zero/../../fp32.pt" in problems(tmp_path / "run")


def test_a_folder_that_is_a_link_to_itself(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "zero" / "b").symlink_to(tmp_path / "zero" / "b")
    assert problems(tmp_path) == ""


@pytest.mark.parametrize("text", ["../outside", "/", "", "\0"])
def test_trackers_that_lead_elsewhere(text: str, tmp_path: Path) -> None:
    write(tmp_path / "outside")
    run = tmp_path / "run"
    run.mkdir()
    (run / "latest_universal").write_text(text)
    assert DeepSpeedUniversal().detect(run) is None
