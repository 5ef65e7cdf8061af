"""The simplest interpreter of a target: every tensor gathered whole with numpy, every file written at once."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from math import prod
from pathlib import Path

import numpy as np

from unshard.dtypes import DType
from unshard.target import Target
from unshard.tensors import SourceFile, Tensor, contiguous_chunk

ROOT = "here"


def gather(tensor: Tensor, roots: Mapping[str, Path]) -> bytes:
    """The row-major bytes of a tensor."""
    grid = np.zeros(tensor.grid, tensor.dtype.numpy)
    for chunk in tensor.chunks:
        extent = chunk.extent
        data = np.frombuffer((roots[extent.file.root] / extent.file.path).read_bytes(), np.uint8)[extent.offset :]
        itemsize = extent.dtype.itemsize
        sizes, strides = (*chunk.box.sizes, itemsize), (*extent.strides, 1)
        view = np.lib.stride_tricks.as_strided(data, sizes, strides).copy().view(extent.dtype.numpy)[..., 0]
        where = tuple(slice(a, b) for a, b in zip(chunk.box.offsets, chunk.box.stops, strict=True))
        with np.errstate(all="ignore"):
            grid[where] = view.astype(tensor.dtype.numpy)
    return grid.tobytes()


def write_target(target: Target, output: Path) -> None:
    """Write all files of a target, and check that each byte of each of them is written exactly once."""
    for file in target.files:
        content = bytearray(file.size)
        written = 0
        pieces = [*file.literals, *[(offset, gather(value, target.roots)) for offset, value in file.tensors]]
        for offset, data in pieces:
            assert not any(content[offset : offset + len(data)])
            content[offset : offset + len(data)] = data
            written += len(data)
        assert written == file.size
        for seal in file.seals:
            assert seal.at >= seal.stop
            content[seal.at : seal.at + 4] = zlib.crc32(content[seal.start : seal.stop]).to_bytes(4, "little")
        path = output / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def store(directory: Path, entries: Mapping[str, tuple[DType, tuple[int, ...]]], seed: int = 0) -> dict[str, Tensor]:
    """Tensors of random bytes in one raw file under the root `here`."""
    random = np.random.default_rng(seed)
    data = bytearray()
    tensors = {}
    for name, (dtype, shape) in entries.items():
        data += b"\0" * (-len(data) % 8)
        size = prod(shape) * dtype.itemsize
        top = 2 if dtype.name == "BOOL" else 256
        chunks = (contiguous_chunk(SourceFile(ROOT, "raw"), len(data), shape, dtype),) if size else ()
        tensors[name] = Tensor(name, dtype, shape, chunks)
        data += random.integers(0, top, size).astype(np.uint8).tobytes()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "raw").write_bytes(data)
    return tensors
