"""Indexes and directories that lie: names that lead elsewhere, absent files, tensors that are in another file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from assembled import ROOT, store, write_target
from unshard.checkpoint import Checkpoint
from unshard.dtypes import F32
from unshard.errors import FormatError
from unshard.formats.contract import Source
from unshard.formats.huggingface.index import read_index
from unshard.formats.huggingface.reader import HuggingFace
from unshard.formats.huggingface.target import lay_out
from unshard.model import Model
from unshard.options import MergeOptions

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A sound model: `a` and `b` in the first file, `c` in the second."""
    tensors = store(tmp_path / "raw", dict.fromkeys("abc", (F32, (4,))))
    source = Checkpoint("test", "test", {ROOT: tmp_path / "raw"}, tensors)
    directory = tmp_path / "model"
    write_target(lay_out(Model(tensors), source, MergeOptions(max_shard_size=32), ()), directory)
    assert not read(directory).problems
    return directory


def read(directory: Path) -> Checkpoint:
    return HuggingFace().read(Source(directory))


def rewrite(directory: Path, weight_map: Mapping[str, str] | None = None, **metadata: object) -> None:
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"] = weight_map or index["weight_map"]
    index["metadata"] |= metadata
    (directory / INDEX).write_text(json.dumps(index))


def messages(checkpoint: Checkpoint) -> str:
    return "\n".join(problem.message for problem in checkpoint.problems)


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "..",
        ".",
        "",
        "sub/model.safetensors",
        "sub\\model.safetensors",
        "C:model.safetensors",
        "model\0.safetensors",
        "model\n.safetensors",
        "m" * 256,
    ],
)
def test_a_file_name_that_leads_elsewhere_is_refused(sharded: Path, name: str) -> None:
    rewrite(sharded, {"a": name})
    (sharded.parent / "secret.safetensors").write_bytes((sharded / FIRST).read_bytes())
    found = read(sharded)
    assert "same directory" in messages(found)
    assert not found.tensors


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected '{'"),
        ("[]", "expected '{'"),
        ("{}", "no weight_map"),
        ('{"weight_map": {}} x', "after the end"),
        ('{"weight_map": []}', "expected '{'"),
        ('{"weight_map": {"a": 1}}', "expected a string"),
        ('{"weight_map": {"a": ["b"]}}', "expected a string"),
        ('{"weight_map": {"a": "b", "a": "c"}}', "twice"),
        ('{"weight_map": {"\\ud800": "b"}}', "Unicode"),
        ('{"metadata": {"total_size": NaN}, "weight_map": {}}', "malformed"),
        ('{"metadata": {"x": ' + "[" * 100_000, "nested too deeply"),
        ('{"metadata": {"x": ' + "[]," * 100_000, "malformed"),
        ('{"metadata": ' + "[" * 10, "malformed"),
    ],
)
def test_a_malformed_index_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(FormatError, match=words):
        read_index(tmp_path / INDEX)


def test_an_index_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(b'{"weight_map": {"\xff": "b"}}')
    with pytest.raises(FormatError, match="utf-8"):
        read_index(tmp_path / INDEX)


def test_all_that_is_wrong_is_told_at_once(sharded: Path) -> None:
    rewrite(sharded, {"a": FIRST, "c": FIRST, "d": SECOND, "e": "model-00003-of-00003.safetensors"})
    found = messages(read(sharded))
    assert "1 of 3 files that are not there: model-00003-of-00003.safetensors" in found
    assert "names the wrong file for 1 tensors: c" in found
    assert "names 1 tensors that are in none of its files: d" in found
    assert "does not list 1 tensors that are in its files: b" in found


def test_names_cannot_command_the_terminal(sharded: Path) -> None:
    rewrite(sharded, {"\x1b[2J": FIRST, "n" * 10_000: FIRST})
    found = messages(read(sharded))
    assert r"\x1b[2J" in found
    assert found.replace("\n", "").isprintable()
    assert len(found) < 2000


def test_a_stale_total_is_told(sharded: Path) -> None:
    rewrite(sharded, total_size=47)
    catalog = read(sharded)
    assert "tells of 47 bytes of tensors; there are 48" in catalog.notes[-1].text
    assert catalog.notes[-1].level == "warning"
    assert not catalog.problems  # the files themselves say how long they are


@pytest.mark.parametrize("total", [48, 48.0, None, "48", [48]])
def test_a_total_that_is_right_or_absent_or_no_number_is_accepted(sharded: Path, total: object) -> None:
    rewrite(sharded, total_size=total)
    assert not read(sharded).problems
    assert not read(sharded).notes


def test_a_tensor_in_two_files_is_told(sharded: Path) -> None:
    (sharded / SECOND).write_bytes((sharded / FIRST).read_bytes())
    found = messages(read(sharded))
    assert f"{SECOND} holds 2 tensors that lie in other files too: a, b (the first in {FIRST})" in found
    assert "in none of its files: c" in found


def test_a_damaged_file_does_not_hide_the_others(sharded: Path) -> None:
    (sharded / FIRST).write_bytes((1000).to_bytes(8, "little"))
    found = read(sharded)
    assert "truncated" in messages(found)
    assert list(found.tensors) == ["c"]


def test_a_file_that_is_a_link_to_nothing_is_told(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    (sharded / SECOND).symlink_to("nothing")
    assert "cannot be read" in messages(read(sharded))


@pytest.mark.parametrize("name", [INDEX, SECOND])
def test_a_named_pipe_is_told_and_not_waited_for(sharded: Path, name: str) -> None:
    (sharded / name).unlink()
    os.mkfifo(sharded / name)
    assert "not a regular file" in messages(read(sharded))


def test_without_an_index_missing_shards_are_told(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    whole = read(sharded)
    assert list(whole.tensors) == ["a", "b", "c"]
    assert not whole.problems
    assert "there is no index" in whole.notes[0].text
    (sharded / FIRST).rename(sharded / "model-00003-of-00003.safetensors")
    assert "several saves: 1 of 2 and 1 of 3" in messages(read(sharded))
    (sharded / SECOND).unlink()
    assert "2 of 3 weights files are missing, the first of them number 1" in messages(read(sharded))


def test_a_number_above_the_count_stands_for_no_missing_shard(sharded: Path) -> None:
    """Such a file made up for a missing one where as many lay there as there should be, and broke us where more did."""
    (sharded / INDEX).unlink()
    stray = sharded / "model-00077-of-00002.safetensors"
    stray.write_bytes((sharded / FIRST).read_bytes())
    assert "number 77, which is none of 2" in messages(read(sharded))
    (sharded / SECOND).unlink()
    assert "number 77, which is none of 2" in messages(read(sharded))


def test_shards_may_be_counted_from_0(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    (sharded / FIRST).rename(sharded / "model-00000-of-00002.safetensors")
    (sharded / SECOND).rename(sharded / "model-00001-of-00002.safetensors")
    assert not read(sharded).problems


def test_pieces_of_tensors_are_not_taken_for_a_model(sharded: Path) -> None:
    header = (
        b'{"__metadata__":{"DCP_SHARDING_INFO":"{\\"a\\": {\\"saved_offsets\\": [4]}}"},'
        b'"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    )
    (sharded / FIRST).write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    assert "distributed checkpoint" in messages(read(sharded))
