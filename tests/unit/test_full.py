"""State dicts in one torch file, and what else such a file may hold."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from assembled import gather
from format_contract import check_format
from unshard.checkpoint import Checkpoint
from unshard.dtypes import F32
from unshard.errors import FormatError, NotACheckpointError
from unshard.formats import FORMATS
from unshard.formats.contract import Source
from unshard.formats.full import FullStateDict
from unshard.formats.state_dict import find_state_dict, what_it_is
from unshard.formats.torch_file.records import Global, Opaque, Storage, StoredTensor, UnsupportedTensor
from unshard.tensors import SourceFile


def read(path: Path) -> Checkpoint:
    return FullStateDict().read(Source(path))


def tensor(size: int = 2) -> StoredTensor:
    return StoredTensor(Storage(SourceFile("source", "f"), "0", F32, size, 0, 4 * size), F32, (size,), (1,), 0)


@pytest.mark.parametrize("case", ["layout_accelerate_full", "layout_legacy_stream", "layout_lone_file"])
def test_the_contract_of_formats(case: str, committed_golden: Path, tmp_path: Path) -> None:
    check_format(FullStateDict(), committed_golden / case / "ckpt", tmp_path)


def test_a_named_file_needs_no_usual_name(committed_golden: Path, tmp_path: Path) -> None:
    place = tmp_path / "step_7.ckpt"
    shutil.copy(committed_golden / "layout_lone_file/ckpt/model.pt", place)
    assert FullStateDict().detect(tmp_path) is None
    assert FullStateDict().detect(place) == "a torch file"
    assert read(place).title == "step_7.ckpt: plain tensors, 1 rank"


def test_several_files_are_listed(committed_golden: Path, tmp_path: Path) -> None:
    source = committed_golden / "layout_lone_file/ckpt/model.pt"
    for name in ("pytorch_model_fsdp.bin", "pytorch_model_fsdp_1.bin"):
        shutil.copy(source, tmp_path / name)
    assert FullStateDict().detect(tmp_path) == "2 torch files"
    with pytest.raises(NotACheckpointError, match=r"pytorch_model_fsdp\.bin, pytorch_model_fsdp_1\.bin"):
        read(tmp_path)


def test_one_ranks_file_is_not_taken_for_the_whole(committed_golden: Path, tmp_path: Path) -> None:
    place = tmp_path / "model.pt"
    shutil.copy(committed_golden / "fsdp2_w4/ckpt/model_world_size_4_rank_2.pt", place)
    (problem,) = read(place).problems
    assert "of 4 are missing: 15 of 15 tensors have holes" in problem.message


def test_a_world_of_one_in_dtensors_is_whole(committed_golden: Path, tmp_path: Path) -> None:
    place = tmp_path / "model.pt"
    shutil.copy(committed_golden / "fsdp2_w1/ckpt/model_world_size_1_rank_0.pt", place)
    checkpoint = read(place)
    assert checkpoint.problems == ()
    name, first = next(iter(checkpoint.tensors.items()))
    assert name
    assert len(gather(first, checkpoint.roots)) == first.size_in_bytes


class TestNesting:
    @pytest.mark.parametrize("key", ["model", "state_dict", "module", "model_state_dict"])
    def test_one_level_is_unwrapped_and_what_lies_beside_is_told(self, key: str) -> None:
        inner = {"w": tensor()}
        found, left_out = find_state_dict({key: inner, "optimizer": {"state": {}}, "step": 3}, "f.pt")
        assert found == inner
        assert set(left_out) == {"optimizer", "step"}

    def test_a_module_of_that_name_is_not_unwrapped(self) -> None:
        flat = {"w": tensor(), "model": {"x": tensor()}}
        assert find_state_dict(flat, "f.pt")[0] == flat

    def test_an_empty_state_dict(self) -> None:
        assert find_state_dict({}, "f.pt") == ({}, {})

    def test_keys_that_are_no_names(self) -> None:
        found, left_out = find_state_dict({"w": tensor(), 7: tensor()}, "f.pt")
        assert (list(found), list(left_out)) == (["w"], ["7"])

    @pytest.mark.parametrize(
        ("root", "words"),
        [
            (Opaque(Global("transformers", "Qwen2ForCausalLM")), "object of class transformers.Qwen2ForCausalLM"),
            ([1, 2], "a list, not a state dict"),
            (tensor(), "a StoredTensor, not a state dict"),
        ],
    )
    def test_what_is_no_state_dict(self, root: Any, words: str) -> None:
        with pytest.raises(FormatError, match=f"f.pt: .*{words}"):
            find_state_dict(root, "f.pt")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "the value None"),
        (3, "the value 3"),
        ({"a": 1}, "a dict of 1 entries"),
        (b"xx", "a bytes"),
        (Global("a", "b"), "the name a.b"),
        (Opaque(Global("io", "BytesIO")), "an object of class io.BytesIO"),
    ],
)
def test_entries_that_are_no_tensors_are_skipped_with_the_reason(
    value: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert what_it_is(value) == words
    checkpoint = read_records({"w": tensor(), "layer._extra_state": value}, tmp_path, monkeypatch)
    assert list(checkpoint.tensors) == ["w"]
    assert checkpoint.skipped == {"layer._extra_state": f"no tensor, but {words}"}
    assert checkpoint.problems == ()


def test_a_tensor_that_cannot_be_read_is_a_problem_and_not_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = read_records({"w": tensor(), "q": UnsupportedTensor("is quantised", (4,))}, tmp_path, monkeypatch)
    assert [problem.message for problem in checkpoint.problems] == ["q, rank 0: this tensor is quantised"]
    assert checkpoint.skipped == {}


def test_problems_without_number_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = {f"q{number}": UnsupportedTensor("is quantised", (4,)) for number in range(300)}
    problems = read_records(bad, tmp_path, monkeypatch).problems
    assert len(problems) < 40
    assert any("280 more problems" in problem.message for problem in problems)


def read_records(root: Any, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """Reads a file whose contents are these records."""
    from unshard.formats.torch_file.reader import TorchFile

    (directory / "model.pt").write_bytes(b"")
    monkeypatch.setattr(
        "unshard.formats.fsdp.reading.read_torch_file", lambda _path, _file: TorchFile(root, "zip", frozenset())
    )
    return read(directory / "model.pt")


def test_names_of_formats_are_unique() -> None:
    names = [found.name for found in FORMATS]
    assert len(set(names)) == len(names)
    assert {"fsdp", "huggingface", "full"} <= set(names)
