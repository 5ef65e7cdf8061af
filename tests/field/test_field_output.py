"""Faults from the field in the directory that is written: side files, indexes, outputs that are not whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from field_cases import copy_case, edit_json, merge, refuse, same, truth

import unshard
from fsdp_bytes import numbers, world, write_json, write_ranks
from golden.tensor_files import read_tensors
from unshard.cli import main
from unshard.errors import FormatError, IncompleteError, OutputError, VerificationError
from unshard.report.events import Event, PhaseFinished

EOS = b'{ "eos_token_id" : [151643,\n 151645], "temperature": 0.60, "nobody_knows": {"this": null} }\n\n'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of a golden checkpoint with config, tokenizer and generation config."""
    return copy_case("fsdp2_w4", tmp_path / "actor")


@pytest.mark.parametrize("options", [{}, {"dtype": "bf16"}, {"max_shard_size": 9000}, {"container": "bin"}], ids=str)
def test_generation_config_is_copied_byte_for_byte(options: dict[str, Any], source: Path, tmp_path: Path) -> None:
    """verl#1246: the EOS list `[151643, 151645]` became `151643`, and generation did not stop."""
    (source / "huggingface" / "generation_config.json").write_bytes(EOS)
    unshard.merge(source, tmp_path / "out", **options)
    assert (tmp_path / "out" / "generation_config.json").read_bytes() == EOS


@pytest.mark.parametrize("content", [b"{", b"[]", b"", b"\xff\xfe"], ids=repr)
def test_malformed_generation_config_is_not_taken_for_an_absent_one(
    content: bytes, source: Path, tmp_path: Path
) -> None:
    """verl#7198: a malformed file counted as none, and the multi-EOS list was lost."""
    (source / "huggingface" / "generation_config.json").write_bytes(content)
    error = refuse(source, tmp_path / "out")
    assert isinstance(error, FormatError)
    assert "generation_config.json" in error.message


@pytest.mark.parametrize("name", ["generation_config.json", "chat_template.jinja", "tokenizer_config.json"])
def test_optional_side_file_may_be_absent(name: str, source: Path, tmp_path: Path) -> None:
    """verl#2658: "does not appear to have a file named generation_config.json" ended the save."""
    (source / "huggingface" / name).unlink()
    assert merge(source, tmp_path / "out")[1] == truth("fsdp2_w4")
    assert not (tmp_path / "out" / name).exists()


def test_tokenizer_is_the_checkpoints_own(source: Path, tmp_path: Path) -> None:
    """NeMo-RL#2210: the tokenizer was taken from the base model that the config names."""
    base = copy_case("fsdp2_w4", tmp_path / "base", "ckpt/huggingface")
    (base / "tokenizer.json").write_text("{}")
    edit_json(source / "huggingface" / "config.json", _name_or_path=str(base))
    edit_json(base / "config.json", told="by the base")
    own = (source / "huggingface" / "tokenizer.json").read_bytes()
    unshard.merge(source, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == own
    unshard.merge(source, tmp_path / "config_only", config=base / "config.json")
    assert (tmp_path / "config_only" / "tokenizer.json").read_bytes() == own
    assert json.loads((tmp_path / "config_only" / "config.json").read_text())["told"] == "by the base"
    unshard.merge(source, tmp_path / "all", config=base)
    assert (tmp_path / "all" / "tokenizer.json").read_text() == "{}"


def test_what_would_fail_at_the_end_fails_before_the_first_byte(source: Path, tmp_path: Path) -> None:
    """verl#1680: "object has no attribute 'config_path'" after all shards had been loaded."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    events: list[Event] = []
    with pytest.raises(OutputError, match="not empty"):
        unshard.merge(source, tmp_path / "full", sink=events.append)
    assert events == []
    assert os.listdir(tmp_path / "full") == ["notes.txt"]
    (source / "huggingface" / "config.json").unlink()
    assert "--config" in str(refuse(source, tmp_path / "out").hint)
    (source / "huggingface" / "config.json").write_text('{"model_type": ')
    assert "config.json" in refuse(source, tmp_path / "out").message


def test_too_little_disk_is_known_before_the_first_byte(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """axolotl#3073: the automatic merge of a 120B model died when the disk was full."""
    nearly_full = os.statvfs_result((512, 512, 9999, 2, 2, 99, 99, 99, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _path: nearly_full)
    error = refuse(source, tmp_path / "out")
    assert isinstance(error, OutputError)
    assert "1.02 kB are free" in error.message


def test_no_name_lies_in_two_files(tmp_path: Path) -> None:
    """verl#6259: of 64 ranks, 98 tensors came out in two files each."""
    tensors = {f"layers.{number}.weight": numbers(70, 3, start=number) for number in range(40)}
    source = write_ranks(tmp_path / "actor", world(64), tensors)
    found = merge(source, tmp_path / "out", weights_only=True, max_shard_size=3000)[1]  # read_tensors refuses doubles
    assert same(found, tensors)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 5
    first, second = sorted((tmp_path / "out").glob("*.safetensors"))[:2]
    second.write_bytes(first.read_bytes())
    with pytest.raises(IncompleteError, match=r"names the wrong file|in none of its files"):
        unshard.open(tmp_path / "out")
    (tmp_path / "out" / "model.safetensors.index.json").unlink()
    with pytest.raises(IncompleteError, match="lie in other files too"):
        unshard.open(tmp_path / "out")


def test_index_is_always_there_and_tells_the_true_size(tmp_path: Path) -> None:
    """torchtitan#2137, NeMo-RL#491, exo#1956: no index beside the shards, `.bin` only, "333k params" for 7.6B."""
    tensors = {f"layers.{number}.weight": numbers(70, 3, start=number) for number in range(9)}
    source = write_ranks(tmp_path / "actor", world(3), tensors)
    unshard.merge(source, tmp_path / "out", weights_only=True, max_shard_size=3000)
    files = {path.name for path in (tmp_path / "out").iterdir()}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert files == {*index["weight_map"].values(), "model.safetensors.index.json"}
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in tensors.values())


def test_index_without_a_total_size_is_read_and_a_stale_one_is_told(tmp_path: Path) -> None:
    """huggingface_hub#4221, Edge0#104: `total_size` is absent, or that of another model."""
    source = write_ranks(tmp_path / "actor", world(2), {"a": numbers(50, 4), "b": numbers(50, 4)})
    unshard.merge(source, tmp_path / "out", weights_only=True, max_shard_size=900)
    index = tmp_path / "out" / "model.safetensors.index.json"
    edit_json(index, metadata=None)
    assert set(unshard.open(tmp_path / "out")) == {"a", "b"}
    edit_json(index, metadata={"total_size": 333_000})
    notes = unshard.open(tmp_path / "out").checkpoint.notes
    assert any(note.level == "warning" and "333,000" in note.text and "1,600" in note.text for note in notes)


def _delete_a_shard(output: Path) -> None:
    min(output.glob("*.safetensors")).unlink()


def _delete_the_index(output: Path) -> None:
    (output / "model.safetensors.index.json").unlink()


def _truncate_a_shard(output: Path) -> None:
    os.truncate(min(output.glob("*.safetensors")), min(output.glob("*.safetensors")).stat().st_size - 1)


def _change_a_byte(output: Path) -> None:
    path = max(output.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def _swap_two_names(output: Path) -> None:
    index = output / "model.safetensors.index.json"
    for path in output.glob("*.safetensors"):
        path.write_bytes(path.read_bytes().replace(b"k_proj", b"v_PROJ").replace(b"v_proj", b"k_proj"))
        path.write_bytes(path.read_bytes().replace(b"v_PROJ", b"v_proj"))
    assert index.exists()


def _empty_the_config(output: Path) -> None:
    (output / "config.json").write_text("")


@pytest.mark.parametrize("damage", [
    _delete_a_shard, _delete_the_index, _truncate_a_shard, _change_a_byte, _swap_two_names, _empty_the_config,
])  # fmt: skip
def test_success_is_never_said_of_a_damaged_output(
    damage: Callable[[Path], None], source: Path, tmp_path: Path
) -> None:
    """verl#7191, verl#4338, torchtitan#307: success with one of the files, with none, or with partial weights."""
    output, events = tmp_path / "out", []

    def sink(event: Event) -> None:
        events.append(event)
        if isinstance(event, PhaseFinished) and event.phase == "write":
            damage(output)

    with pytest.raises((VerificationError, FormatError, IncompleteError)):
        unshard.merge(source, output, max_shard_size=9000, sink=sink)
    assert PhaseFinished in {type(event) for event in events}


INTERRUPTED = """
import os, resource, signal, sys
import unshard
from unshard.report.events import Advanced

def sink(event):
    if sys.argv[3] == "kill" and isinstance(event, Advanced):
        os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[3] == "full":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9_000_000, 9_000_000))
unshard.merge(sys.argv[1], sys.argv[2], sink=sink, weights_only=True, dtype="fp32")
"""
"""Widens what is stored, so that writing takes long enough to be interrupted: progress is told after 20 ms at first."""


@pytest.mark.parametrize("how", ["kill", "full"])
def test_interrupted_merge_leaves_nothing_that_looks_whole(how: str, tmp_path: Path) -> None:
    """NeMo-RL#3624, Automodel#3261, NeMo-RL#1102: truncated files under their final names, which stopped the rerun."""
    source = write_ranks(tmp_path / "actor", world(2), {f"layers.{n}.weight": (4 << 20, 1) for n in range(12)})
    output = tmp_path / "out"
    words = [sys.executable, "-c", INTERRUPTED, str(source), str(output), how]
    ended = subprocess.run(words, capture_output=True, check=False, text=True)
    assert ended.returncode == (-signal.SIGKILL if how == "kill" else 1)
    assert how == "kill" or "OutputError" in ended.stderr
    assert [path.name for path in output.glob("*") if not path.name.startswith(".")] == []
    found = merge(source, output, weights_only=True)[1]
    assert set(found) == {f"layers.{n}.weight" for n in range(12)}
    assert [path.name for path in output.iterdir()] == ["model.safetensors"]


def test_truncated_model_is_never_read_as_a_whole_one(source: Path, tmp_path: Path) -> None:
    """NeMo-RL#3624: a consolidation that timed out left truncated safetensors."""
    unshard.merge(source, tmp_path / "out")
    model = tmp_path / "out" / "model.safetensors"
    os.truncate(model, model.stat().st_size - 1)
    with pytest.raises(FormatError, match=r"model\.safetensors"):
        unshard.verify(tmp_path / "out")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """A hub client that writes down what it is asked for, and what lay in the folder then."""
    calls: list[tuple[str, dict[str, Any]]] = []

    class HfApi:
        def create_repo(self, **words: Any) -> None:
            calls.append(("create", words))

        def upload_folder(self, **words: Any) -> None:
            calls.append(("upload", words | {"names": set(read_tensors(Path(words["folder_path"])))}))

    module = ModuleType("huggingface_hub")
    module.__spec__ = ModuleSpec("huggingface_hub", None)
    vars(module)["HfApi"] = HfApi
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return calls


def test_upload_happens_once_and_after_verification(
    hub: list[tuple[str, dict[str, Any]]], source: Path, tmp_path: Path
) -> None:
    """verl#7226: every rank uploaded the same checkpoint at the same time."""
    words = ["--hf_upload_path", "me/model", "--private"]
    assert main(["merge", "--local_dir", str(source), "--target_dir", str(tmp_path / "out"), *words]) == 0
    assert [call for call, _ in hub] == ["create", "upload"]
    assert hub[0][1]["private"] is True
    assert hub[1][1]["names"] == set(truth("fsdp2_w4"))
    write_json(source / "fsdp_config.json", {"world_size": 5})
    hub.clear()
    assert main(["merge", str(source), str(tmp_path / "no"), *words]) == IncompleteError.exit_code
    assert hub == []
