"""What is measured: the baseline, unshard, and the peers that are installed."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.checkpoint import Generated

_CONSOLIDATE = """
import glob, os, sys
from safetensors import safe_open
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
source, output = sys.argv[1:]
with safe_open(min(glob.glob(source + "/shard-*")), "pt") as shard:
    names = list(shard.keys())
consolidate_safetensors_files(source, output, dict.fromkeys(names, 1), num_threads=2)
os.sync()
"""
_TO_TORCH = """
import sys
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(*sys.argv[1:])
"""
_MERGE_WEIGHTS = """
import sys
from accelerate.utils import merge_fsdp_weights
merge_fsdp_weights(*sys.argv[1:])
"""
_ZERO_TO_FP32 = """
import sys
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
convert_zero_checkpoint_to_fp32_state_dict(*sys.argv[1:], safe_serialization=True)
"""


@dataclass(frozen=True)
class Contender:
    """A way from a checkpoint to an output.

    command: from the checkpoint and an output path that does not exist yet to argv, or to a line for the shell.
    dtype:   what the output holds; None: it is no model, and is not compared.
    module:  the module of another project's program, which may not work here; empty for our own.
    """

    title: str
    command: Callable[[Generated, Path], list[str] | str]
    dtype: str | None
    module: str = ""

    @property
    def is_peer(self) -> bool:
        return bool(self.module)


def _concatenate(checkpoint: Generated, output: Path) -> str:
    shards, target = " ".join([shlex.quote(str(path)) for path in checkpoint.baseline]), shlex.quote(str(output))
    return f"cat {shards} > {target} && sync {target}"


def _unshard(*options: str) -> Callable[[Generated, Path], list[str]]:
    def command(checkpoint: Generated, output: Path) -> list[str]:
        merge = [sys.executable, "-m", "unshard", "merge", str(checkpoint.directory), str(output)]
        beside = checkpoint.config.is_relative_to(checkpoint.directory)
        return [*merge, *options] if beside else [*merge, *options, "--config", str(checkpoint.config)]

    return command


def contenders(peers: str, checkpoint: Generated) -> list[Contender]:
    """All of them that read such a checkpoint; `peers` is the Python in which other projects are looked for."""
    stored = checkpoint.shape.dtype
    found = [
        Contender("cat SHARDS > file && sync file", _concatenate, None),
        Contender("unshard --verify structure", _unshard("--verify", "structure"), stored),
        Contender("unshard", _unshard(), stored),
    ]
    if stored != "BF16":
        to_bf16 = _unshard("--dtype", "bf16", "--verify", "structure")
        found.append(Contender("unshard --dtype bf16 --verify structure", to_bf16, "BF16"))
    return found + [peer for peer in _peers(peers, checkpoint) if _has(peers, peer.module)]


def _peers(python: str, checkpoint: Generated) -> Iterator[Contender]:
    """Other projects' programs for such a checkpoint. None merges Megatron's per-rank files without Megatron itself."""
    source, stored = checkpoint.directory, checkpoint.shape.dtype

    def script(text: str, place: Path, make: bool = False) -> Callable[[Generated, Path], list[str]]:
        def command(_: Generated, output: Path) -> list[str]:
            if make:
                output.mkdir()
            return [python, "-c", text, str(place), str(output)]

        return command

    def verl(_: Generated, output: Path) -> list[str]:
        merge = [python, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
        return [*merge, "--local_dir", str(source), "--target_dir", str(output)]

    match checkpoint.name:
        case "fsdp":
            yield Contender("verl.model_merger (to bf16, no fsync)", verl, "BF16", "verl.model_merger")
        case "dcp":
            place = source / "pytorch_model_fsdp_0"
            merge = script(_MERGE_WEIGHTS, place, make=True)
            yield Contender("accelerate merge-weights (no fsync)", merge, stored, "accelerate")
            to_torch = script(_TO_TORCH, place)
            module = "torch.distributed.checkpoint.format_utils"
            yield Contender("torch's dcp_to_torch_save (no fsync)", to_torch, None, module)
        case "hf_shards":
            module = "torch.distributed.checkpoint._consolidate_hf_safetensors"
            yield Contender("torch's consolidation, and sync", script(_CONSOLIDATE, source, make=True), stored, module)
        case "zero2" | "zero3":
            to_fp32 = script(_ZERO_TO_FP32, source)
            yield Contender("DeepSpeed's zero_to_fp32 (no fsync)", to_fp32, stored, "deepspeed.utils.zero_to_fp32")


def _has(python: str, module: str) -> bool:
    return subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False).returncode == 0
