"""An index that contradicts the files: an error, and what `--repair-index` makes of it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from assembled import ROOT, store, write_target
from unshard.checkpoint import Checkpoint, Shape
from unshard.dtypes import F32
from unshard.formats.contract import Source
from unshard.formats.huggingface.reader import HuggingFace
from unshard.formats.huggingface.target import lay_out
from unshard.model import Model
from unshard.options import Container, MergeOptions

NAMES = {"safetensors": "model{}.safetensors", "bin": "pytorch_model{}.bin"}


@pytest.fixture(params=["safetensors", "bin"])
def kind(request: pytest.FixtureRequest) -> Container:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def files(kind: Container) -> list[str]:
    return [NAMES[kind].format(f"-{number:05d}-of-00003") for number in (1, 2, 3)]


@pytest.fixture
def model(tmp_path: Path, kind: Container) -> Path:
    """`a` and `b` in the first file, `c` and `d` in the second, `e` in the third."""
    tensors = store(tmp_path / "raw", dict.fromkeys("abcde", (F32, (4,))))
    source = Checkpoint("test", "test", {ROOT: tmp_path / "raw"}, tensors)
    options = MergeOptions(container=kind, max_shard_size=32)
    write_target(lay_out(Model(tensors), source, options, ()), tmp_path / "model")
    return tmp_path / "model"


def index_of(model: Path) -> Path:
    (index,) = model.glob("*.index.json")
    return index


def edit(model: Path, **changes: Any) -> None:
    """Set entries of the weight map; None removes one."""
    content = json.loads(index_of(model).read_text())
    content["weight_map"] = {k: v for k, v in (content["weight_map"] | changes).items() if v is not None}
    index_of(model).write_text(json.dumps(content))


def read(model: Path, *, repair: bool, shapes: Collection[str] | None = None) -> Checkpoint:
    def told(_config: object, _names: Collection[str]) -> Mapping[str, Shape] | None:
        return None if shapes is None else dict.fromkeys(shapes, (4,))

    return HuggingFace().read(Source(model, named_shapes=told, repair_index=repair))


def said(found: Checkpoint) -> str:
    return "\n".join([str(problem) for problem in found.problems] + [note.text for note in found.notes])


def assert_repaired(model: Path, words: str, **options: Any) -> None:
    """An error as it is, which shows the way out; all tensors and a note when asked."""
    damaged = read(model, repair=False)
    assert any(words in problem.message for problem in damaged.problems), damaged.problems
    assert all("--repair-index" in str(problem.hint) for problem in damaged.problems)
    found = read(model, repair=True, **options)
    assert found.problems == ()
    assert sorted(found.tensors) == list("abcde")
    assert any(words in note.text and "taken from the files as they are" in note.text for note in found.notes)


def test_a_sound_index_needs_no_repair(model: Path) -> None:
    assert read(model, repair=True) == read(model, repair=False)
    assert read(model, repair=True).notes == ()


def test_a_file_that_never_was(model: Path, files: list[str]) -> None:
    edit(model, a="nowhere" + files[0])
    assert_repaired(model, "1 of 4 files that are not there")


def test_the_wrong_file_of_a_tensor(model: Path, files: list[str]) -> None:
    edit(model, a=files[2])
    assert_repaired(model, "names the wrong file for 1 tensors: a")


def test_tensors_that_are_not_listed(model: Path) -> None:
    edit(model, a=None, d=None)
    assert_repaired(model, "does not list 2 tensors that are in its files: a, d")


def test_a_file_that_is_not_listed(model: Path, files: list[str]) -> None:
    """None of its tensors is listed, so that nothing tells of it but its number."""
    edit(model, e=None)
    assert_repaired(model, f"does not name 1 files that are numbered as its own: {files[2]}")


def test_files_of_another_number(model: Path, files: list[str]) -> None:
    """The index of an earlier save, which cut the model into more files."""
    edit(model, **{name: NAMES["safetensors"].format(f"-{n:05d}-of-00005") for n, name in enumerate("abcde", 1)})
    assert_repaired(model, "5 of 5 files that are not there")


@pytest.mark.parametrize("text", ["", "{", '{"weight_map": 3}', '{"weight_map": {"a": "../x.safetensors"}}', "[]"])
def test_an_index_that_cannot_be_read(model: Path, text: str) -> None:
    index_of(model).write_text(text)
    damaged = read(model, repair=False)
    assert index_of(model).name in said(damaged)
    assert "--repair-index" in said(damaged)
    found = read(model, repair=True)
    assert (found.problems, sorted(found.tensors)) == ((), list("abcde"))
    assert index_of(model).name in found.notes[0].text


def test_weights_cannot_be_repaired(model: Path, files: list[str]) -> None:
    """A missing file is an error, unless nothing of the model was in it."""
    (model / files[2]).unlink()
    for options in ({}, {"shapes": "abcde"}):
        assert "names 1 tensors that no file here holds: e" in said(read(model, repair=True, **options))
    found = read(model, repair=True, shapes="abcd")
    assert (found.problems, sorted(found.tensors)) == ((), list("abcd"))
    assert f"names 1 of 3 files that are not there: {files[2]}" in said(found)


def test_weights_without_a_readable_index_are_counted(model: Path, files: list[str]) -> None:
    (model / files[1]).unlink()
    index_of(model).write_text("{")
    assert "1 of 3 weights files are missing, the first of them number 2" in said(read(model, repair=True))


def test_a_tensor_that_no_file_has(model: Path, files: list[str]) -> None:
    edit(model, ghost=files[0])
    assert_repaired(model, "names 1 tensors that are in none of its files: ghost", shapes="abcde")
    assert "names 1 tensors that no file here holds: ghost" in said(read(model, repair=True, shapes=["ghost", "a"]))


def test_files_of_two_saves_are_not_put_together(model: Path, files: list[str], kind: Container) -> None:
    """Which of them is the model cannot be known, index or not."""
    for number, file in enumerate(files, 1):
        (model / NAMES[kind].format(f"-{number:05d}-of-00009")).write_bytes((model / file).read_bytes())
    (model / files[1]).unlink()
    assert "lie in other files too" in said(read(model, repair=True))


def test_a_damaged_file_is_one_error_and_not_repaired(model: Path, files: list[str]) -> None:
    (model / files[0]).write_bytes((model / files[0]).read_bytes()[:-40])
    for repair in (False, True):
        found = read(model, repair=repair)
        assert [files[0] in problem.message for problem in found.problems] == [True]
        assert sorted(found.tensors) == list("cde")


@pytest.mark.parametrize("total", [1, None])
def test_a_wrong_total_is_told_and_no_error(model: Path, total: int | None) -> None:
    content = json.loads(index_of(model).read_text())
    content["metadata"] = {"total_size": total}
    index_of(model).write_text(json.dumps(content))
    found = read(model, repair=False)
    assert found.problems == ()
    assert len(found.notes) == (total is not None)


def test_an_index_with_a_name_of_its_own(model: Path, kind: Container) -> None:
    """Those of diffusers, and of models that NeMo Automodel saves for it."""
    if kind == "bin":
        return
    for path in list(model.glob("model*")):
        path.rename(path.with_name(f"diffusion_pytorch_{path.name}"))
    content = index_of(model).read_text()
    index_of(model).write_text(content.replace("model-", "diffusion_pytorch_model-"))
    found = read(model, repair=False)
    assert (found.problems, found.notes, sorted(found.tensors)) == ((), (), list("abcde"))
    assert found.title == "A Hugging Face model, safetensors files with an index"
