"""Generated checkpoints: a Llama of random fp32 weights, as four FSDP2 ranks would have saved it through verl.

The rank files are written by PyTorch itself, with real DTensors. Four ranks need no four processes for that: a fake
process group lets one process be each of them in turn.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

WORLD = 4
_BLOCK = 1 << 22
"""Random numbers drawn per checkpoint; each tensor is a rotation of them, which is quicker."""

_TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "unshard": 1}, "unk_token": "<unk>"},
}
"""The least that transformers loads: some peers insist on a tokenizer."""


@dataclass(frozen=True)
class Shape:
    """The architecture of a model: so many hidden layers of so many channels."""

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes in the order of the model."""
        wide, narrow = self.intermediate, self.hidden
        yield "model.embed_tokens.weight", (self.vocabulary, narrow)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            for name in "qkvo":
                yield f"{prefix}.self_attn.{name}_proj.weight", (narrow, narrow)
            yield f"{prefix}.mlp.gate_proj.weight", (wide, narrow)
            yield f"{prefix}.mlp.up_proj.weight", (wide, narrow)
            yield f"{prefix}.mlp.down_proj.weight", (narrow, wide)
            yield f"{prefix}.input_layernorm.weight", (narrow,)
            yield f"{prefix}.post_attention_layernorm.weight", (narrow,)
        yield "model.norm.weight", (narrow,)
        yield "lm_head.weight", (self.vocabulary, narrow)

    @property
    def size(self) -> int:
        """Bytes in fp32."""
        return sum([4 * prod(shape) for _, shape in self.tensors()])

    def config(self) -> dict[str, Any]:
        """config.json."""
        heads = self.hidden // 64
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": 64,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
        }


SHAPES = {"0.5": Shape(1024, 2816, 8, 16_000), "2": Shape(1536, 4096, 15, 32_000)}
"""By their size in GB."""


@dataclass(frozen=True)
class Generated:
    """A checkpoint on the disk.

    ranks:  its rank files, verl's layout.
    shards: the same pieces as torch's DCP saves them for Hugging Face, for its consolidation.
    truth:  per dtype ("F32", "BF16") and tensor the xxh3-64 of its bytes.
    """

    directory: Path
    size: int
    ranks: tuple[Path, ...]
    shards: Path
    truth: dict[str, dict[str, str]]


def generate(name: str, directory: Path) -> Generated:
    """The checkpoint of that size below `directory`, written unless it is there already, by a process of its own."""
    root = directory / f"llama-{name}GB"
    if not (root / "truth.json").exists():
        subprocess.run([sys.executable, "-m", "benchmarks.checkpoint", name, root], check=True)
    truth = json.loads((root / "truth.json").read_text())
    ranks = tuple([root / "actor" / _rank_name(rank) for rank in range(WORLD)])
    return Generated(root / "actor", SHAPES[name].size, ranks, root / "dcp", truth)


def _write(shape: Shape, root: Path) -> None:
    source, shards = root / "actor", root / "dcp"
    (source / "huggingface").mkdir(parents=True, exist_ok=True)
    shards.mkdir(exist_ok=True)
    (source / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": WORLD}))
    (source / "huggingface" / "config.json").write_text(json.dumps(shape.config(), indent=2))
    (source / "huggingface" / "tokenizer.json").write_text(json.dumps(_TOKENIZER))
    (source / "huggingface" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    for rank in range(WORLD):
        shard = shards / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"
        _save_rank(shape, rank, source / _rank_name(rank), shard)
    (root / "truth.json").write_text(json.dumps(_hash(shape)))


def _rank_name(rank: int) -> str:
    return f"model_world_size_{WORLD}_rank_{rank}.pt"


def _draw(shape: Shape) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor, always the same."""
    block = np.random.default_rng(shape.hidden).standard_normal(_BLOCK, dtype=np.float32) * np.float32(0.02)
    for number, (name, sizes) in enumerate(shape.tensors()):
        repeated = np.resize(np.roll(block, 7919 * number), prod(sizes))
        yield name, repeated.reshape(sizes)


def _save_rank(shape: Shape, rank: int, path: Path, shard: Path) -> None:
    """What one rank saves: verl's torch.save of a sharded state dict, and DCP's safetensors file of its pieces."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import save_file
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    state: dict[str, torch.Tensor] = {}
    pieces: dict[str, torch.Tensor] = {}
    offsets: dict[str, dict[str, list[int]]] = {}
    for name, whole in _draw(shape):
        step = -(-whole.shape[0] // WORLD)
        local = torch.from_numpy(whole[rank * step : (rank + 1) * step].copy())
        sizes = torch.Size(whole.shape)
        strides = torch.empty(sizes, device="meta").stride()
        state[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=sizes, stride=strides)
        pieces[name] = local
        offsets[name] = {"saved_offsets": [rank * step] + [0] * (whole.ndim - 1)}
    torch.save(state, path)
    save_file(pieces, shard, {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)})
    dist.destroy_process_group()


def _hash(shape: Shape) -> dict[str, dict[str, str]]:
    import ml_dtypes

    truth: dict[str, dict[str, str]] = {"F32": {}, "BF16": {}}
    for name, values in _draw(shape):
        truth["F32"][name] = xxhash.xxh3_64_hexdigest(values.data)
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


if __name__ == "__main__":
    _write(SHAPES[sys.argv[1]], Path(sys.argv[2]))
