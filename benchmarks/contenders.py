"""What is measured: the baseline, unshard, and the peers that are installed."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.checkpoint import Generated

_CONSOLIDATE = """
import sys
from safetensors import safe_open
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
with safe_open(sys.argv[1] + "/" + sys.argv[3], "pt") as shard:
    names = list(shard.keys())
consolidate_safetensors_files(sys.argv[1], sys.argv[2], dict.fromkeys(names, 1), num_threads=2)
"""


@dataclass(frozen=True)
class Contender:
    """A way from a checkpoint to an output.

    command: from the checkpoint and an output path that does not exist yet to argv, or to a line for the shell.
    dtype:   what the output holds; None: it is no model, and is not compared.
    is_peer: another project's program, which may not work here.
    """

    title: str
    command: Callable[[Generated, Path], list[str] | str]
    dtype: str | None
    is_peer: bool = False


def _concatenate(checkpoint: Generated, output: Path) -> str:
    shards, target = " ".join([shlex.quote(str(path)) for path in checkpoint.ranks]), shlex.quote(str(output))
    return f"cat {shards} > {target} && sync {target}"


def _unshard(*options: str) -> Callable[[Generated, Path], list[str]]:
    def command(checkpoint: Generated, output: Path) -> list[str]:
        return [sys.executable, "-m", "unshard", "merge", str(checkpoint.directory), str(output), *options]

    return command


def contenders(peers: str) -> list[Contender]:
    """All of them; `peers` is the Python in which verl and torch are looked for."""
    found = [
        Contender("cat SHARDS > file && sync file", _concatenate, None),
        Contender("unshard --verify structure", _unshard("--verify", "structure"), "F32"),
        Contender("unshard", _unshard(), "F32"),
        Contender(
            "unshard --dtype bf16 --verify structure", _unshard("--dtype", "bf16", "--verify", "structure"), "BF16"
        ),
    ]
    if _has(peers, "verl.model_merger"):

        def verl(checkpoint: Generated, output: Path) -> list[str]:
            merge = [peers, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
            return [*merge, "--local_dir", str(checkpoint.directory), "--target_dir", str(output)]

        found.append(Contender("verl.model_merger (to bf16, no fsync)", verl, "BF16", is_peer=True))
    if _has(peers, "torch.distributed.checkpoint._consolidate_hf_safetensors"):

        def consolidate(checkpoint: Generated, output: Path) -> list[str]:
            output.mkdir()
            first = min(checkpoint.shards.iterdir()).name
            return [peers, "-c", _CONSOLIDATE, str(checkpoint.shards), str(output), first]

        found.append(Contender("torch DCP consolidation (no fsync)", consolidate, "F32", is_peer=True))
    return found


def _has(python: str, module: str) -> bool:
    return subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False).returncode == 0
