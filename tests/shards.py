"""Tensors that hold given numpy arrays, and the arrays that tensors hold: for tests of what joins shards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from assembled import ROOT, gather
from reference import Array
from unshard.dtypes import DTYPES
from unshard.tensors import SourceFile, Tensor, contiguous_chunk


class Shelf:
    """A directory in which every array gets a file of its own."""

    def __init__(self, directory: Path) -> None:
        self.roots = {ROOT: directory}
        self.count = 0

    def put(self, name: str, array: Array) -> Tensor:
        self.count += 1
        file = SourceFile(ROOT, f"{self.count}.raw")
        (self.roots[ROOT] / file.path).write_bytes(array.tobytes())
        dtype = next(known for known in DTYPES if known.numpy == array.dtype)
        chunks = (contiguous_chunk(file, 0, array.shape, dtype),) if array.size else ()
        return Tensor(name, dtype, array.shape, chunks)

    def put_all(self, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
        return {name: self.put(name, array) for name, array in arrays.items()}

    def array(self, tensor: Tensor) -> Array:
        return np.frombuffer(gather(tensor, self.roots), tensor.dtype.numpy).reshape(tensor.shape)


def numbers(*shape: int, start: float = 0.5) -> Array:
    """Different numbers, as float32."""
    return (np.arange(int(np.prod(shape))) + start).astype(np.float32).reshape(shape)
