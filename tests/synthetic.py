"""Catalogues of the shape of large models, without files: for tests of how a plan grows."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

from unshard.checkpoint import Checkpoint
from unshard.dtypes import BF16, F32, DType
from unshard.target import Target, TargetFile
from unshard.tensors import Box, Chunk, Extent, SourceFile, Tensor, row_major_strides, stack

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


def megatron_671b(layers: int = 61, experts: int = 256, pipeline: int = 16, expert_parallel: int = 16) -> Checkpoint:
    """DeepSeek-V3 as a reader of Megatron's ranks tells it: three dense layers, then experts, one chunk for each.

    Every rank of expert parallelism has a replica of what is not of experts.
    """
    hidden, inner, wide, heads, rows = 7168, 2048, 18432, 128, 129_280
    files = RankFiles("mp_rank_00_{}/model_optim_rng.pt")
    tensors: dict[str, Tensor] = {}

    def add(name: str, shape: tuple[int, ...], stage: int, dtype: DType = BF16) -> None:
        ranks = range(stage * expert_parallel, (stage + 1) * expert_parallel)
        chunks = [Chunk(Box.whole(shape), files.save(rank, shape, dtype), rank) for rank in ranks]
        tensors[name] = Tensor(name, dtype, shape, tuple(chunks))

    def add_experts(name: str, shape: tuple[int, ...], stage: int) -> None:
        each = [
            shard_rows(name, shape, BF16, [stage * expert_parallel + number * expert_parallel // experts], files)
            for number in range(experts)
        ]
        tensors[name] = stack(each)

    latent = {
        "linear_q_down_proj.weight": (1536, hidden),
        "linear_q_up_proj.layer_norm_weight": (1536,),
        "linear_q_up_proj.weight": (heads * 192, 1536),
        "linear_kv_down_proj.weight": (576, hidden),
        "linear_kv_up_proj.layer_norm_weight": (512,),
        "linear_kv_up_proj.weight": (heads * 256, 512),
        "linear_proj.weight": (hidden, heads * 128),
    }
    add("embedding.word_embeddings.weight", (rows, hidden), 0)
    for layer in range(layers):
        stage, prefix = layer * pipeline // layers, f"decoder.layers.{layer}"
        add(f"{prefix}.input_layernorm.weight", (hidden,), stage)
        for name, shape in latent.items():
            add(f"{prefix}.self_attention.{name}", shape, stage)
        add(f"{prefix}.pre_mlp_layernorm.weight", (hidden,), stage)
        if layer < 3:
            add(f"{prefix}.mlp.linear_fc1.weight", (2 * wide, hidden), stage)
            add(f"{prefix}.mlp.linear_fc2.weight", (hidden, wide), stage)
            continue
        add(f"{prefix}.mlp.router.weight", (experts, hidden), stage)
        add(f"{prefix}.mlp.router.expert_bias", (experts,), stage, F32)
        add(f"{prefix}.mlp.shared_experts.linear_fc1.weight", (2 * inner, hidden), stage)
        add(f"{prefix}.mlp.shared_experts.linear_fc2.weight", (hidden, inner), stage)
        add_experts(f"{prefix}.mlp.experts.linear_fc1.weight", (2 * inner, hidden), stage)
        add_experts(f"{prefix}.mlp.experts.linear_fc2.weight", (hidden, inner), stage)
    add("decoder.final_layernorm.weight", (hidden,), pipeline - 1)
    add("output_layer.weight", (rows, hidden), pipeline - 1)
    config = {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": wide,
        "moe_intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_shared_experts": 1,
        "n_routed_experts": experts,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "vocab_size": rows,
        "tie_word_embeddings": False,
    }
    return Checkpoint("megatron", "671B", ROOTS, tensors, config, dialect="megatron")


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
