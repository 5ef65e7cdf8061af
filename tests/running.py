"""Plans by hand over small source files, for tests of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from unshard.dtypes import BY_NAME, DType
from unshard.plan.moves import Copy, Literal, Move, Plan, PlannedFile
from unshard.run.casting import raw_dtype
from unshard.tensors import SourceFile, Tensor, contiguous_chunk

ROOT = "source"

_STORED = {"float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16", "uint8": "U8", "int64": "I64"}


def write_array(directory: Path, name: str, array: np.ndarray, *, padding: int = 0) -> Tensor:
    """Write an array behind `padding` bytes, and give it as a tensor of one chunk."""
    (directory / name).write_bytes(b"\xa5" * padding + array.tobytes())
    dtype = BY_NAME[_STORED[array.dtype.name]]
    chunk = contiguous_chunk(SourceFile(ROOT, name), padding, array.shape, dtype)
    return Tensor(name, dtype, array.shape, (chunk,))


def plan(directory: Path, *files: PlannedFile) -> Plan:
    """A plan whose sources lie in `directory`."""
    return Plan({ROOT: directory}, files)


def literal_file(path: str, data: bytes, *, last: bool = False) -> PlannedFile:
    """A small file whose bytes the plan holds."""
    return PlannedFile(path, len(data), (Literal(0, data),) if data else (), last=last)


def copied_file(path: str, pieces: Sequence[tuple[str, int, int]], *, last: bool = False) -> PlannedFile:
    """A file made of spans: source name, offset, size."""
    moves: list[Move] = []
    at = 0
    for name, offset, size in pieces:
        moves.append(Copy(at, size, SourceFile(ROOT, name), offset))
        at += size
    return PlannedFile(path, at, tuple(moves), last=last)


def raw(array: np.ndarray, dtype: DType) -> np.ndarray:
    """The bits of an array, for comparisons in which NaN equals itself."""
    return np.ascontiguousarray(array).view(raw_dtype(dtype))


def tree(directory: Path) -> dict[str, bytes]:
    """All files of a directory, hidden ones included, by relative path; of links, where they lead."""
    return {
        path.relative_to(directory).as_posix(): bytes(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() or path.is_symlink()
    }
