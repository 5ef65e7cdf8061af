"""Checkpoints of every kind in which one file is missing or cut short: an error that names it, or the exact truth.

What people find on their disks after interrupted saves, full disks, and downloads that ended early.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from field_cases import copy_case, merge, refuse, same, truth, warnings

import dcp_bytes as db
import hf_shard_bytes as hb
import unshard
from fsdp_bytes import numbers
from golden.tensor_files import Stored, read_tensors
from golden_set import GoldenCase, Run, committed_cases

QUICK = {
    "accelerate_fsdp2", "accelerate_fsdp2_ranks", "dcp_fsdp2", "dcp_rank_metadata_hsdp", "deepspeed_moe_ep2_w4",
    "deepspeed_pipeline_pp2_tied_w4", "deepspeed_z0_bf16", "deepspeed_z1_bf16_optimizer", "deepspeed_z2_trainer",
    "deepspeed_z2_w1", "deepspeed_z3_gathered", "deepspeed_z3_tied", "deepspeed_z3_universal", "hf_shards_hsdp",
    "hf_shards_two_files",
}  # fmt: skip
"""One or two of each kind; the others are tried in the slow tests."""
KINDS = ("accelerate_", "dcp_", "deepspeed_", "hf_shards_")
ALONE = {
    "accelerate_fsdp2_full/pytorch_model_fsdp.bin",
    "deepspeed_z0_bf16/mp_rank_00_model_states.pt",
    "deepspeed_z0_fp16/mp_rank_00_model_states.pt",
    "deepspeed_z0_fp32/mp_rank_00_model_states.pt",
}
"""Without these files there is no checkpoint any more, and nothing that could tell which files there were."""
OTHER_TRUTHS: Mapping[str, tuple[str, str]] = {
    "deepspeed_z2_w1/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": ("truth16", "no optimizer states lie here"),
    "deepspeed_z3_gathered/latest": ("truth16", "the model beside DeepSpeed's own checkpoint global_step1 was taken"),
}
"""Without these files another model is the right answer, with a warning that it is one."""
UNPROVABLE = {"hf_shards_custom_code/shard-00002-model-00001-of-00001.safetensors"}
"""The last shard of a model whose shapes nothing tells: it cannot be known to be missing, which a warning says."""


def lose(path: Path) -> None:
    path.unlink()


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cut_a_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def _cases() -> list[Any]:
    cases = [case for case in committed_cases() if case.name.startswith(KINDS)]
    slow = [pytest.mark.slow]
    return [pytest.param(case, id=case.name, marks=[] if case.name in QUICK else slow) for case in cases]


@pytest.mark.parametrize("harm", [lose, halve, cut_a_byte, empty])
@pytest.mark.parametrize("case", _cases())
def test_one_damaged_file_is_named_or_was_not_needed(
    case: GoldenCase, harm: Callable[[Path], None], tmp_path: Path
) -> None:
    """NeMo-RL#3624, verl#4081, LlamaFactory#8098: saves cut short, of which something was made all the same."""
    run = next(run for run in case.runs if run.error is None)
    expected = read_tensors(case.directory / (run.model or str(run.adapter)))
    wrong: list[str] = []
    for file in sorted(path for path in case.source.rglob("*") if path.is_file()):
        copy = tmp_path / "copy"
        shutil.copytree(case.source, copy)
        harm(copy / file.relative_to(case.source))
        if complaint := _merge(case, run, copy, tmp_path / "out", file.name, expected):
            wrong.append(f"{file.relative_to(case.source)}: {complaint}")
        shutil.rmtree(copy)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert wrong == []


def _merge(case: GoldenCase, run: Run, copy: Path, output: Path, file: str, expected: dict[str, Stored]) -> str:
    """What is wrong with the answer, or ""."""
    place = f"{case.name}/{file}"
    try:
        report = unshard.merge(copy, output, **_options(case, run))
    except unshard.UnshardError as error:
        if output.exists():
            return f"something was written before {error}"
        is_gone = place in ALONE and "no checkpoint was found" in error.message
        return "" if is_gone or is_named(file, str(error)) else f"not named by {error}"
    found = read_tensors(output)
    if found == expected:
        return ""
    if place in UNPROVABLE and "could not be proven" in warnings(report):
        return ""
    truth, warning = OTHER_TRUTHS.get(place, ("", ""))
    if truth and found == read_tensors(case.directory / truth) and warning in warnings(report):
        return ""
    return "another model was written"


def _options(case: GoldenCase, run: Run) -> dict[str, Any]:
    """What is typed, as what Python is given."""
    words = [word.format(case=case.directory) for word in run.options]
    found: dict[str, Any] = {}
    for place, word in enumerate(words):
        if word.startswith("--"):
            key = word[2:].replace("-", "_")
            has_value = place + 1 < len(words) and not words[place + 1].startswith("--")
            found[key] = words[place + 1] if has_value else True
    return found


def is_named(file: str, text: str) -> bool:
    """Whether a message names a file: itself, by a pattern that can be typed, or by the number of its rank."""
    patterns = [word for word in re.findall(r"[\w.*-]*\*[\w.*-]*", text) if len(word.replace("*", "")) > 10]
    if file in text or any(fnmatchcase(file, pattern) for pattern in patterns):
        return True
    if shard := re.match(r"shard-0*(\d+)-", file):
        number = int(shard[1])
        return bool(re.search(rf"missing: ([^\n]*[ ,])?(shards? {number}\b|shards after number {number - 1}\n)", text))
    if rank := re.search(r"rank_?(\d+)|__(\d+)\.metadata", file):
        return bool(re.search(rf"\branks? {rank[1] or rank[2]}\b", text))
    return False


# Files of several saves ----------------------------------------------------------------------------------------------


def test_files_of_a_larger_world_are_left_over_in_a_dcp_directory(tmp_path: Path) -> None:
    """Automodel#3261: a directory that was used again. The metadata tell which files are of the save."""
    tensors = {"a.weight": numbers(12, 3), "b.weight": numbers(7, 2, start=50)}
    db.save(tmp_path / "ckpt", {name: array + 1 for name, array in tensors.items()}, 4)
    for file in (tmp_path / "ckpt").glob("__[01]_*"):
        file.unlink()
    db.save(tmp_path / "ckpt", tensors, 2)
    assert same(merge(tmp_path / "ckpt", tmp_path / "out", weights_only=True)[1], tensors)


@pytest.mark.parametrize("other", ["world", "model", "dtype", "width"])
def test_dcp_files_of_another_save_are_named(other: str, tmp_path: Path) -> None:
    """LlamaFactory#1253: saves of several worlds or runs in one directory, whose files have the same names."""
    tensors = {"a.weight": numbers(12, 3), "b.weight": numbers(8, 2, start=50)}
    source = db.save(tmp_path / "ckpt", tensors, 2)
    changed = {
        "world": tensors,
        "model": {"a.weight": numbers(12, 5), "b.weight": numbers(8, 2)},
        "dtype": {name: array.astype(np.int64) for name, array in tensors.items()},
        "width": {name: array.astype(np.float16) for name, array in tensors.items()},
    }[other]
    strange = db.save(tmp_path / "other", changed, 3 if other == "world" else 2)
    shutil.copyfile(strange / "__1_0.distcp", source / "__1_0.distcp")
    assert "__1_0.distcp" in refuse(source, tmp_path / "out", weights_only=True).message


@pytest.mark.parametrize("ranks", [(2, 3), (3, 2), (2, 4), (4, 2)])
def test_shards_of_two_worlds_are_never_joined(ranks: tuple[int, int], tmp_path: Path) -> None:
    """The same of torch's safetensors shards, which have no metadata: what fits together by chance must be one save."""
    tensors = {"a.weight": numbers(12, 3), "b.weight": numbers(7, 2, start=50)}
    hb.write_ranks(tmp_path / "ckpt", {name: array + 1 for name, array in tensors.items()}, ranks[0])
    hb.write_ranks(tmp_path / "ckpt", tensors, ranks[1])
    if ranks[0] < ranks[1]:
        assert same(merge(tmp_path / "ckpt", tmp_path / "out", weights_only=True)[1], tensors)
    else:
        assert "several saves" in refuse(tmp_path / "ckpt", tmp_path / "out", weights_only=True).message


@pytest.mark.parametrize("kind", ["DCP", "shards"])
def test_tensors_without_elements_come_out(kind: str, tmp_path: Path) -> None:
    """peft#2892, trl#4416: a shape with a zero is no sign of damage, where it is the tensor's own."""
    tensors = {
        "empty": numbers(0, 4),
        "a.weight": numbers(5, 3),
        "b.empty": numbers(3, 0),
        "scalar": np.array(7.0, np.float32),
    }
    if kind == "DCP":
        source = db.save(tmp_path / "ckpt", tensors, 4)
    else:
        source = tmp_path / "ckpt"
        hb.write_ranks(source, tensors, 4)
    assert same(merge(source, tmp_path / "out", weights_only=True)[1], tensors)


@pytest.mark.parametrize("latest", ["global_step9", "../run", "/etc", "", "global_step1/", "\0", "x" * 9999])
@pytest.mark.parametrize("case", ["deepspeed_z2_bf16", "deepspeed_z3_universal"])
def test_tag_that_is_not_there_is_never_another_one(case: str, latest: str, tmp_path: Path) -> None:
    """DeepSpeed#7663: `latest` names what was not copied, or nothing; it leads out of the directory never."""
    golden = next(golden for golden in committed_cases() if golden.name == case)
    source = copy_case(case, tmp_path / "run")
    tracker = next(path for path in source.iterdir() if path.name.startswith("latest"))
    tracker.write_text(latest)
    options = _options(golden, golden.runs[0])
    if latest == "global_step9":
        assert "global_step9" in refuse(source, tmp_path / "out", **options).message
    else:
        assert merge(source, tmp_path / "out", **options)[1] == truth(case)
