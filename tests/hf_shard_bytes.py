"""Shards as torch's HuggingFaceStorageWriter writes them, byte for byte by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"
Part: TypeAlias = tuple[Sequence[int], Array]
"""Where a piece begins, and the piece."""

TYPES = {"float32": "F32", "float64": "F64", "int64": "I64", "uint8": "U8", "bool": "BOOL"}


def write_shard(
    directory: Path,
    number: int,
    parts: Mapping[str, Part],
    *,
    file: int = 1,
    count: int = 1,
    dtypes: Mapping[str, str] | None = None,
    info: str | None = None,
) -> Path:
    """One file. `dtypes`: types of tensors that numpy has none for; `info`: what stands in place of the offsets."""
    header: dict[str, Any] = {}
    offsets: dict[str, Any] = {}
    data = b""
    for name, (start, array) in parts.items():
        raw = array.tobytes()
        header[name] = {
            "dtype": (dtypes or {}).get(name) or TYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        offsets[name] = {"saved_offsets": list(start)}
        data += raw
    text = json.dumps(offsets) if info is None else info
    header["__metadata__"] = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": text}
    return write_file(directory / f"shard-{number:05d}-model-{file:05d}-of-{count:05d}.safetensors", header, data)


def write_file(path: Path, header: Mapping[str, Any], data: bytes) -> Path:
    """A safetensors file of any header."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def cut_rows(array: Array, ranks: int, rank: int) -> Part:
    """The rows of a rank as torch.chunk cuts them, and where they begin; past the end: nothing, at the end."""
    step = -(-len(array) // ranks)
    start = min(rank * step, len(array))
    return (start, *[0] * (array.ndim - 1)), array[start : start + step]


def write_ranks(directory: Path, tensors: Mapping[str, Array], ranks: int) -> None:
    """A checkpoint whose tensors are cut along their rows; scalars are the first rank's."""
    for rank in range(ranks):
        parts = {name: cut_rows(array, ranks, rank) for name, array in tensors.items() if array.ndim}
        if rank == 0:
            parts |= {name: ((), array) for name, array in tensors.items() if not array.ndim}
        write_shard(directory, rank + 1, parts)
