"""The merge as a whole: what is left behind when the last step finds a fault."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from golden_set import COMMITTED
from running import tree
from unshard.errors import FormatError, OutputError, VerificationError
from unshard.merging import merge
from unshard.options import MergeOptions
from unshard.run import local
from unshard.verify import output as output_room


def flip_the_last_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def spoil_the_header(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[20] = 0
    file.write_bytes(content)


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip_the_last_bit, r"differs from rank .*\n.*renamed"),
        (spoil_the_header, "renamed"),
        (cut_short, r"were planned\n.*renamed"),
    ],
)
@pytest.mark.parametrize("shard_size", [10**9, 20_000])
def test_an_output_that_fails_verification_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_size: int, damage: Callable[[Path], None], words: str
) -> None:
    """A disk that returns other bytes than were written: the model must not lie there as if it were whole."""
    run = local.run_plan

    def run_on_a_bad_disk(plan: Any, output: Path, *others: Any, **options: Any) -> Any:
        result = run(plan, output, *others, **options)
        damage(sorted(output.glob("*.safetensors"))[-1])
        return result

    output, options = tmp_path / "out", MergeOptions(max_shard_size=shard_size)
    monkeypatch.setattr(local, "run_plan", run_on_a_bad_disk)
    source = COMMITTED / "fsdp2_w4" / "ckpt"
    with pytest.raises(VerificationError, match=words):
        merge(source, output, options)
    assert not [path.name for path in output.iterdir() if path.suffix in (".safetensors", ".bin")]
    assert not list(output.glob("*.index.json"))

    monkeypatch.setattr(local, "run_plan", run)
    merge(source, output, MergeOptions(max_shard_size=shard_size, overwrite=True))
    assert not list(output.glob("*.failed-verification"))


def test_an_output_that_is_damaged_while_it_is_verified_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its headers were right; then it ends early."""
    real = output_room.check_contents

    def check_after_a_cut(*arguments: Any, **options: Any) -> Any:
        cut_short(tmp_path / "out" / "model.safetensors")
        return real(*arguments, **options)

    monkeypatch.setattr(output_room, "check_contents", check_after_a_cut)
    with pytest.raises(VerificationError, match=r"ends at byte .*\n.*renamed"):
        merge(COMMITTED / "fsdp2_w4" / "ckpt", tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_source_that_vanishes_before_the_verification_is_told_with_the_state_of_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = tmp_path / "ckpt", tmp_path / "out"
    shutil.copytree(COMMITTED / "fsdp2_w4" / "ckpt", source)
    run = local.run_plan

    def run_and_lose_a_rank(*arguments: Any, **options: Any) -> Any:
        result = run(*arguments, **options)
        (source / "model_world_size_4_rank_2.pt").unlink()
        return result

    monkeypatch.setattr(local, "run_plan", run_and_lose_a_rank)
    with pytest.raises(FormatError, match=r"rank_2.pt.*\n.*out` is complete, but could not be verified"):
        merge(source, output)
    assert (output / "model.safetensors").exists()


def test_a_checkpoint_is_not_overwritten_by_its_own_merge(tmp_path: Path) -> None:
    """Beside the ranks lies what only the catalog was read from: config.json, facts of adapters."""
    source = tmp_path / "ckpt"
    shutil.copytree(COMMITTED / "fsdp2_w4" / "ckpt", source)
    (source / "adapter_config.json").write_text("{}")
    before = tree(source)
    with pytest.raises(OutputError, match="is where this merge reads from"):
        merge(source, source, MergeOptions(overwrite=True))
    assert tree(source) == before


def test_weights_only_writes_no_config_and_no_side_files(tmp_path: Path) -> None:
    merge(COMMITTED / "deepspeed_z2_bf16" / "ckpt", tmp_path / "out", MergeOptions(weights_only=True))
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize(
    "name", ["fsdp2_w4", "dcp_fsdp2", "deepspeed_z2_bf16", "hf_shards_consolidated", "hf_shards_w2"]
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_config_replaces_malformed_side_files_as_their_error_says(tmp_path: Path, name: str, file: str) -> None:
    case, source = COMMITTED / name, tmp_path / "ckpt"
    shutil.copytree(case / "ckpt", source)
    for malformed in source.rglob(file):
        malformed.write_text("{")
    with pytest.raises(FormatError, match=rf"{file}: malformed") as caught:
        merge(source, tmp_path / "out")
    assert caught.value.hint == "mend the file, or take another with --config DIR"
    assert merge(source, tmp_path / "out", MergeOptions(config=case / "truth")).family
