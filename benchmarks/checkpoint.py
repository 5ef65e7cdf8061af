"""Generated checkpoints on the disk, and the truth that their merges must come to."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from benchmarks import dcp, deepspeed, fsdp, megatron
from benchmarks.models import Shape


@dataclass(frozen=True)
class Kind:
    """A kind of checkpoint: its models by their size in GB, what writes one, and what is where then.

    source:   the directory that is merged; config: that of its config.json.
    baseline: the files whose bytes belong to the model: what the baseline copies.
    """

    title: str
    shapes: dict[str, Shape]
    write: Callable[[Shape, Path], None]
    source: str
    baseline: str
    config: str


KINDS = {
    "fsdp": Kind("FSDP2, 4 ranks, fp32", fsdp.SHAPES, fsdp.write, "actor", "actor/*.pt", "actor/huggingface"),
    "megatron": Kind(
        "Megatron-LM, TP 4 x PP 2, bf16", megatron.SHAPES, megatron.write, "run", "run/iter_*/mp_rank_*/*.pt", "hf"
    ),
    "dcp": Kind("torch DCP, 4 ranks, fp32", dcp.SHAPES, dcp.write_accelerate, "state", "state/*/*.distcp", "state"),
    "hf_shards": Kind(
        "torch's safetensors shards, 4 ranks, fp32", dcp.SHAPES, dcp.write_shards, "shards", "shards/shard-*", "shards"
    ),
    "zero2": Kind(
        "DeepSpeed ZeRO-2, 4 ranks, masters", deepspeed.SHAPES, deepspeed.write_zero2, "run", "masters/rank_*", "run"
    ),
    "zero3": Kind(
        "DeepSpeed ZeRO-3, 4 ranks, masters", deepspeed.SHAPES, deepspeed.write_zero3, "run", "masters/rank_*", "run"
    ),
}

SIZES = ("0.5", "2")
"""GB of which there is a checkpoint of each kind."""


@dataclass(frozen=True)
class Generated:
    """A checkpoint on the disk.

    name:      of its kind.
    directory: what is merged; `config` is the directory of its config.json.
    baseline:  the files that the baseline copies.
    truth:     per dtype ("F32", "BF16") and tensor the xxh3-64 of its bytes.
    """

    name: str
    kind: Kind
    shape: Shape
    directory: Path
    config: Path
    baseline: tuple[Path, ...]
    truth: dict[str, dict[str, str]]


def generate(kind_name: str, size: str, directory: Path) -> Generated:
    """The checkpoint of that kind and size, written unless it is there already, by a process of its own."""
    kind = KINDS[kind_name]
    root = directory / f"{kind_name}-{size}GB"
    if not (root / "truth.json").exists():
        subprocess.run([sys.executable, "-m", "benchmarks.checkpoint", kind_name, size, root], check=True)
    return Generated(
        kind_name,
        kind,
        kind.shapes[size],
        root / kind.source,
        root / kind.config,
        tuple(sorted(root.glob(kind.baseline))),
        json.loads((root / "truth.json").read_text()),
    )


def _hash(shape: Shape) -> dict[str, dict[str, str]]:
    """Of every tensor as it is, and rounded to bf16."""
    import ml_dtypes

    truth: dict[str, dict[str, str]] = {shape.dtype: {}, "BF16": {}}
    for name, values in shape.draw():
        truth[shape.dtype][name] = xxhash.xxh3_64_hexdigest(values.data)
        if shape.dtype != "BF16":
            truth["BF16"][name] = xxhash.xxh3_64_hexdigest(values.astype(ml_dtypes.bfloat16).view(np.uint16).data)
    return truth


def check(output: Path, truth: dict[str, dict[str, str]], dtype: str) -> None:
    """Raise ValueError unless the safetensors files of a directory hold exactly the truth, in that dtype."""
    found: dict[str, str] = {}
    for path in sorted(output.glob("*.safetensors")):
        data = np.memmap(path, np.uint8, mode="r")
        length = int(data[:8].view("<u8")[0])
        header = json.loads(data[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if entry["dtype"] != dtype:
                raise ValueError(f"{path}: {name} is {entry['dtype']}, not {dtype}")
            start, stop = entry["data_offsets"]
            found[name] = xxhash.xxh3_64_hexdigest(data[8 + length + start : 8 + length + stop].data)
    if found != truth[dtype]:
        wrong = [name for name in truth[dtype] if found.get(name) != truth[dtype][name]]
        raise ValueError(f"{output}: wrong or missing: {wrong[:5]} ({len(wrong)} of {len(truth[dtype])})")


def _write(kind: Kind, shape: Shape, root: Path) -> None:
    kind.write(shape, root)
    (root / kind.config).mkdir(parents=True, exist_ok=True)
    (root / kind.config / "config.json").write_text(json.dumps(shape.config(), indent=2))
    (root / "truth.json").write_text(json.dumps(_hash(shape)))


if __name__ == "__main__":
    _write(KINDS[sys.argv[1]], KINDS[sys.argv[1]].shapes[sys.argv[2]], Path(sys.argv[3]))
