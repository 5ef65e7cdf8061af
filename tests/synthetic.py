"""Catalogues of the shape of large models, without files: for tests of how a plan grows."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

from unshard.dtypes import BF16, DType
from unshard.target import Target, TargetFile
from unshard.tensors import Box, Chunk, Extent, SourceFile, Tensor, row_major_strides

ROOTS = {"checkpoint": Path("/nowhere")}


class RankFiles:
    """The files of ranks that save one storage after the other, aligned as torch aligns them."""

    def __init__(self, pattern: str, alignment: int = 64) -> None:
        self.pattern = pattern
        self.alignment = alignment
        self.files: dict[int, SourceFile] = {}
        self.ends: dict[int, int] = {}

    def save(self, rank: int, sizes: tuple[int, ...], dtype: DType) -> Extent:
        """Where a contiguous block of these sizes lies."""
        file = self.files.setdefault(rank, SourceFile("checkpoint", self.pattern.format(rank)))
        offset = -(-self.ends.get(rank, 0) // self.alignment) * self.alignment
        self.ends[rank] = offset + prod(sizes) * dtype.itemsize
        return Extent(file, offset, row_major_strides(sizes, dtype.itemsize), dtype)


def shard_rows(
    name: str, shape: tuple[int, ...], dtype: DType, ranks: list[int], files: RankFiles, *, axis: int = 0
) -> Tensor:
    """A tensor cut along an axis as torch's `Shard` cuts it: ceil-sized pieces, the last ones short or empty."""
    length = shape[axis]
    step = -(-length // len(ranks))
    chunks = []
    for place, rank in enumerate(ranks):
        start = min(place * step, length)
        stop = min(start + step, length)
        offsets = (*[0] * axis, start, *[0] * (len(shape) - axis - 1))
        sizes = (*shape[:axis], stop - start, *shape[axis + 1 :])
        chunks.append(Chunk(Box(offsets, sizes), files.save(rank, sizes, dtype), rank))
    return Tensor(name, dtype, shape, tuple(chunks))


def dense_70b(world_size: int = 64, layers: int = 80, dtype: DType = BF16) -> Iterator[Tensor]:
    """Llama 70B under FSDP2: 9 tensors a layer, each sharded over all ranks."""
    files = RankFiles(f"model_world_size_{world_size}_rank_{{}}.pt")
    ranks = list(range(world_size))
    shapes = {
        "input_layernorm": (8192,),
        "self_attn.q_proj": (8192, 8192),
        "self_attn.k_proj": (1024, 8192),
        "self_attn.v_proj": (1024, 8192),
        "self_attn.o_proj": (8192, 8192),
        "post_attention_layernorm": (8192,),
        "mlp.gate_proj": (28672, 8192),
        "mlp.up_proj": (28672, 8192),
        "mlp.down_proj": (8192, 28672),
    }
    for layer in range(layers):
        for name, shape in shapes.items():
            yield shard_rows(f"model.layers.{layer}.{name}.weight", shape, dtype, ranks, files)


def experts_671b(
    layers: int = 61, experts: int = 256, pipeline: int = 16, expert_parallel: int = 16, pieces: int = 1
) -> Iterator[Tensor]:
    """DeepSeek-V3's experts under PP and EP: each expert on one (pp, ep) rank, there cut in `pieces` by expert TP."""
    files = RankFiles("rank_{}.pt")
    for layer in range(layers):
        stage = layer * pipeline // layers
        for expert in range(experts):
            owner = (stage * expert_parallel + expert * expert_parallel // experts) * pieces
            ranks = list(range(owner, owner + pieces))
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            yield shard_rows(f"{prefix}.gate_proj.weight", (2048, 7168), BF16, ranks, files)
            yield shard_rows(f"{prefix}.up_proj.weight", (2048, 7168), BF16, ranks, files)
            yield shard_rows(f"{prefix}.down_proj.weight", (7168, 2048), BF16, ranks, files, axis=1)


def lay_out(tensors: list[Tensor], shard_size: int = 5_000_000_000) -> Target:
    """The tensors one behind the other in files of at most `shard_size` bytes."""
    files: list[TargetFile] = []
    placed: list[tuple[int, Tensor]] = []
    position = 0
    for tensor in tensors:
        if placed and position + tensor.size_in_bytes > shard_size:
            files.append(TargetFile(f"model-{len(files)}.bin", position, tensors=tuple(placed)))
            placed, position = [], 0
        placed.append((position, tensor))
        position += tensor.size_in_bytes
    files.append(TargetFile(f"model-{len(files)}.bin", position, tensors=tuple(placed)))
    return Target(tuple(files), ROOTS)
