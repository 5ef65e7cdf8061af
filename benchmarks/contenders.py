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
    shards, target = " ".join([shlex.quote(str(path)) for path in checkpoint.ranks]), shlex.quote(str(output))
    return f"cat {shards} > {target} && sync {target}"


def _unshard(*options: str) -> Callable[[Generated, Path], list[str]]:
    def command(checkpoint: Generated, output: Path) -> list[str]:
        merge = [sys.executable, "-m", "unshard", "merge", str(checkpoint.directory), str(output)]
        beside = checkpoint.config.is_relative_to(checkpoint.directory)
        return [*merge, *options] if beside else [*merge, *options, "--config", str(checkpoint.config)]

    return command


def contenders(peers: str, checkpoint: Generated) -> list[Contender]:
    """All of them that read such a checkpoint; `peers` is the Python in which verl and torch are looked for."""
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
    shards = checkpoint.shards
    if shards is None:
        return

    def verl(checkpoint: Generated, output: Path) -> list[str]:
        merge = [python, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
        return [*merge, "--local_dir", str(checkpoint.directory), "--target_dir", str(output)]

    yield Contender("verl.model_merger (to bf16, no fsync)", verl, "BF16", "verl.model_merger")

    def consolidate(_: Generated, output: Path) -> list[str]:
        output.mkdir()
        return [python, "-c", _CONSOLIDATE, str(shards), str(output), min(shards.iterdir()).name]

    yield Contender(
        "torch DCP consolidation (no fsync)",
        consolidate,
        checkpoint.shape.dtype,
        "torch.distributed.checkpoint._consolidate_hf_safetensors",
    )


def _has(python: str, module: str) -> bool:
    return subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False).returncode == 0
