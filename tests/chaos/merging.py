"""A merge in a process of its own, to be killed: `python merging.py SOURCE OUTPUT [--overwrite]`.

It prints a line when it begins, so that its start-up time does not count among the moments at which it may be killed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from unshard.dtypes import BF16, F32
from unshard.plan.moves import Copy, Literal, Move, Plan, PlannedFile, Tile
from unshard.report.events import ignore
from unshard.run.local import run_plan
from unshard.settings import Settings
from unshard.tensors import Box, Chunk, Extent, SourceFile

ROWS, COLUMNS, RANKS, SHARDS, TENSORS = 64, 256, 4, 3, 8
PIECE = ROWS * COLUMNS * 4
"""Bytes of one tensor in one rank's file."""


def build_plan(source: Path) -> Plan:
    """Three shards of copies and casts, an adapter, side files and an index, from four rank files."""
    ranks = [SourceFile("source", f"rank_{rank}") for rank in range(RANKS)]
    files = [_literal(name, 3000) for name in ("config.json", "tokenizer.json", "lora_adapter/adapter_config.json")]
    for shard in range(SHARDS):
        moves: list[Move] = [Literal(0, b"header--")]
        at = 8
        for number in range(TENSORS):
            for rank in ranks:
                moves.append(Copy(at, PIECE, rank, number * PIECE))
                at += PIECE
            pieces = [
                Chunk(
                    Box((place * ROWS, 0), (ROWS, COLUMNS)), Extent(rank, number * PIECE, (COLUMNS * 4, 4), F32), place
                )
                for place, rank in enumerate(ranks)
            ]
            moves.append(Tile(at, BF16, (RANKS * ROWS, COLUMNS), tuple(pieces), f"tensor {number}"))
            at += moves[-1].size
        files.append(PlannedFile(f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors", at, tuple(moves)))
    files.append(_literal("model.safetensors.index.json", 2000, last=True))
    return Plan({"source": source}, tuple(files))


def _literal(path: str, size: int, *, last: bool = False) -> PlannedFile:
    return PlannedFile(path, size, (Literal(0, path.encode().ljust(size)),), last=last)


if __name__ == "__main__":
    print("begins", flush=True)
    settings = Settings(jobs=2, buffer=1 << 16)
    run_plan(build_plan(Path(sys.argv[1])), Path(sys.argv[2]), settings, ignore, overwrite="--overwrite" in sys.argv)
