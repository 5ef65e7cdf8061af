"""Whole outputs, as they stand in `snapshots/`: one text file per scene.

Set UNSHARD_UPDATE_SNAPSHOTS=1 to write them anew, then read the difference as a user would.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import megatron_scenes
import pytest

from commands import run
from unshard import __version__

SNAPSHOTS = Path(__file__).parent / "snapshots"
UPDATE = "UNSHARD_UPDATE_SNAPSHOTS"


@dataclass(frozen=True)
class Scene:
    """Commands that are run one after the other in an empty directory.

    lines:   the command lines; CASES stands for the committed golden checkpoints.
    arrange: makes what must lie there before; it is given the empty directory and the cases.
    """

    lines: tuple[str, ...]
    arrange: Callable[[Path, Path], None] = lambda _place, _cases: None


def _lose_ranks(place: Path, cases: Path) -> None:
    shutil.copytree(cases / "fsdp2_w4" / "ckpt", place / "ckpt")
    for rank in (1, 3):
        (place / "ckpt" / f"model_world_size_4_rank_{rank}.pt").unlink()


def _damage(place: Path, cases: Path) -> None:
    shutil.copytree(cases / "fsdp2_w4" / "ckpt", place / "ckpt")
    for rank in (1, 3):
        file = place / "ckpt" / f"model_world_size_4_rank_{rank}.pt"
        file.write_bytes(file.read_bytes()[:-100])


def _forget_config(place: Path, cases: Path) -> None:
    shutil.copytree(cases / "fsdp2_w4" / "ckpt", place / "ckpt")
    shutil.rmtree(place / "ckpt" / "huggingface")


def _flip_a_bit(place: Path, cases: Path) -> None:
    shutil.copytree(cases / "fsdp2_w4" / "truth", place / "out")
    file = place / "out" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def _lie_elsewhere(place: Path, _cases: Path) -> None:
    (place / "llama").mkdir()
    (place / "llama" / "model.gguf").write_bytes(b"")


SCENES = {
    "help": Scene(("unshard --help",)),
    "help_inspect": Scene(("unshard inspect --help",)),
    "help_plan": Scene(("unshard plan --help",)),
    "help_merge": Scene(("unshard merge --help",)),
    "help_verify": Scene(("unshard verify --help",)),
    "help_test": Scene(("unshard test --help",)),
    "help_demo": Scene(("unshard demo --help",)),
    "version": Scene(("unshard --version", "unshard --version --json")),
    "inspect": Scene(("unshard inspect CASES/fsdp2_hsdp/ckpt", "unshard inspect CASES/lora/ckpt --tensors")),
    "inspect_a_run": Scene(("unshard inspect CASES/layout_run/ckpt",)),
    "inspect_a_model": Scene(("unshard inspect CASES/fsdp2_w4/truth",)),
    "inspect_problems": Scene(("unshard inspect ckpt",), _lose_ranks),
    "plan": Scene(("unshard plan CASES/fsdp2_bf16_tied/ckpt OUT", "unshard plan CASES/lora_only/ckpt -v")),
    "merge": Scene(("unshard merge CASES/fsdp2_w4/ckpt OUT", "unshard merge CASES/fsdp2_w4/ckpt OUT")),
    "merge_tied": Scene(("unshard merge CASES/fsdp2_bf16_tied/ckpt OUT",)),
    "merge_to_bf16_bin": Scene(("unshard merge CASES/fsdp2_w4/ckpt OUT --dtype bf16 --format bin -v",)),
    "merge_in_shards": Scene(("unshard merge CASES/fsdp2_w4/ckpt OUT --max-shard-size 2kB --verify sample",)),
    "merge_lora": Scene(("unshard merge CASES/lora/ckpt OUT",)),
    "merge_lora_fused": Scene(("unshard merge CASES/lora/ckpt OUT --fuse-lora",)),
    "merge_lora_alone": Scene(("unshard merge CASES/lora_only/ckpt OUT",)),
    "merge_filled": Scene(
        (
            "unshard merge CASES/deepspeed_z2_excluded/ckpt OUT",
            "unshard merge CASES/deepspeed_z2_excluded/ckpt OUT --fill-from CASES/deepspeed_z2_excluded/truth16",
            "unshard verify OUT --against CASES/deepspeed_z2_excluded/ckpt "
            "--fill-from CASES/deepspeed_z2_excluded/truth16",
        )
    ),
    "weights": Scene(
        (
            "unshard inspect CASES/deepspeed_z3_bf16/ckpt",
            "unshard merge CASES/deepspeed_z3_bf16/ckpt OUT --weights model",
            "unshard merge CASES/fsdp2_w4/ckpt OUT2 --weights model",
        )
    ),
    "merge_as_verl": Scene(
        ("unshard merge --backend fsdp --local_dir CASES/fsdp2_w4/ckpt --use_cpu --trust --low_cpu --private",)
    ),
    "verify": Scene(("unshard verify CASES/fsdp2_w4/truth",)),
    "verify_against": Scene(("unshard verify CASES/fsdp2_w4/truth --against CASES/fsdp2_w4/ckpt",)),
    "verify_against_rounded": Scene(
        (
            "unshard merge CASES/fsdp2_w4/ckpt OUT --dtype bf16 -q",
            "unshard verify OUT --against CASES/fsdp2_w4/ckpt",
            "unshard verify OUT --against CASES/fsdp2_w4/ckpt --dtype bf16",
            "unshard verify OUT --against CASES/fsdp2_w4/ckpt --atol 0.01",
        )
    ),
    "verify_a_flipped_bit": Scene(("unshard verify out --against CASES/fsdp2_w4/ckpt",), _flip_a_bit),
    "verify_other_names": Scene(("unshard verify CASES/fsdp2_w4/truth --against CASES/fsdp2_mixtral/truth",)),
    "test_as_verl": Scene(("unshard test --backend fsdp --local_dir CASES/lora/ckpt --test_hf_dir CASES/lora/truth",)),
    "demo": Scene(("unshard demo",)),
    "error_usage": Scene(
        (
            "unshard",
            "unshard merg CASES/fsdp2_w4/ckpt OUT",
            "unshard frobnicate",
            "unshard CASES/fsdp2_w4/ckpt OUT",
            "unshard merge",
            "unshard merge CASES/fsdp2_w4/ckpt",
            "unshard inspect",
            "unshard inspect CASES/fsdp2_w4/ckpt OUT",
            "unshard merge CASES/fsdp2_w4/ckpt OUT --dtpye bf16",
            "unshard merge CASES/fsdp2_w4/ckpt OUT --quux",
            "unshard merge CASES/fsdp2_w4/ckpt OUT --t",
            "unshard merge CASES/fsdp2_w4/ckpt OUT --dtype int8",
            "unshard merge CASES/fsdp2_w4/ckpt OUT --max-shard-size 5x",
            "unshard merge CASES/fsdp2_w4/ckpt OUT --jobs 0",
            "unshard merge CASES/fsdp2_w4/ckpt ''",
            "unshard merge CASES/fsdp2_w4/ckpt OUT --fuse-lora --adapter-only",
            "unshard merge CASES/fsdp2_w4/ckpt OUT --tie-word-embedding --untie-word-embedding",
            "unshard merge CASES/fsdp2_w4/ckpt OUT --local_dir CASES/lora/ckpt",
            "unshard test CASES/fsdp2_w4/ckpt",
            "unshard verify CASES/fsdp2_w4/truth --atol -1",
        )
    ),
    "error_nothing_there": Scene(("unshard inspect nothing", "unshard merge . OUT")),
    "error_several_candidates": Scene(("unshard merge CASES/fsdp2_w4 OUT",)),
    "error_foreign_format": Scene(("unshard merge llama OUT",), _lie_elsewhere),
    "error_backend": Scene(
        (
            "unshard merge --backend megatron --local_dir CASES/fsdp2_w4/ckpt --target_dir OUT",
            "unshard merge --backend fsdp --local_dir CASES/fsdp2_w4/truth --target_dir OUT",
        )
    ),
    "error_missing_ranks": Scene(("unshard merge ckpt OUT",), _lose_ranks),
    "error_damaged_files": Scene(("unshard merge ckpt OUT", "unshard merge ckpt OUT --json"), _damage),
    "error_no_config": Scene(("unshard merge ckpt OUT", "unshard merge ckpt OUT --config nowhere"), _forget_config),
    "error_heads": Scene(("unshard merge CASES/fsdp2_w4/ckpt OUT --num-attention-heads 3",)),
    "error_no_alpha": Scene(("unshard merge CASES/lora_no_alpha/ckpt OUT",)),
    "error_tied_but_different": Scene(("unshard merge CASES/tied_but_different/ckpt OUT",)),
    "error_hub_name": Scene(("unshard merge CASES/fsdp2_w4/ckpt OUT --hf_upload_path 'my model'",)),
    **{name: Scene(*scene) for name, scene in megatron_scenes.SCENES.items()},
}


@pytest.mark.parametrize("name", SCENES)
def test_scene(name: str, committed_golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "dumb")
    scene = SCENES[name]
    scene.arrange(tmp_path, committed_golden)
    found = "\n".join([_play(line, committed_golden, tmp_path) for line in scene.lines])
    found = _normalize(found, {str(committed_golden): "CASES", str(tmp_path): "HERE"})
    file = SNAPSHOTS / f"{name}.txt"
    if os.environ.get(UPDATE):
        file.write_text(found, encoding="utf-8")
    assert found == file.read_text(encoding="utf-8"), f"{UPDATE}=1 pytest {__file__} takes it over"


def _play(line: str, cases: Path, place: Path) -> str:
    """What a line shows. One that fails must leave behind what was there."""
    words = [word.replace("CASES", str(cases)) for word in shlex.split(line)]
    before = sorted(place.rglob("*"))
    code, stdout, stderr = run(*words[1:])
    assert code == 0 or sorted(place.rglob("*")) == before
    parts = [f"$ {line}\n", stdout, *(["-- stderr --\n", stderr] if stderr else []), f"-- exit {code} --\n"]
    return "".join(parts)


_FIGURES = (
    (r"(?<=\n)usage: (.+\n)+", "usage: …\n"),  # argparse breaks these lines another way in every version
    (r"[0-9.]+ (?:[kMGT]?B)/s", "RATE/s"),
    (r"(?<=time)( +)[0-9.]+ s: writing [0-9.]+ s, verifying [0-9.]+ s", r"\1TIME: writing TIME, verifying TIME"),
    (r"(?<=memory)( +)[0-9.]+ MB", r"\1SIZE"),
    (r'("(?:\w*seconds(?:_left)?|bytes_per_second|peak_memory_bytes)": )[0-9.]+', r"\1FIGURE"),
    (re.escape(__version__), "VERSION"),
    (r"[^\s\"`]*/demo_data", "DEMO"),
)
"""What differs from run to run, or from machine to machine."""


def _normalize(text: str, places: dict[str, str]) -> str:
    for place, name in places.items():
        text = text.replace(place, name)
    for pattern, name in _FIGURES:
        text = re.sub(pattern, name, text)
    return text


def test_every_snapshot_has_its_scene() -> None:
    assert {file.stem for file in SNAPSHOTS.glob("*.txt")} == set(SCENES)
