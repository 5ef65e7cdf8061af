"""Megatron-LM's rank files by hand, without torch: a small decoder in Hugging Face's names, and as its ranks hold it.

Written from megatron-core's classes, knowing nothing of the package under test: `numpy` cuts and groups what the reader
has to put together again.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import torch_bytes as opcodes
from fsdp_bytes import Array, Content, RankFile, record, world, write_json

Weights = dict[str, Array]
FILE = "model_optim_rng.pt"


@dataclass(frozen=True)
class Decoder:
    """A decoder of grouped-query attention with a gated MLP, or with experts; every value of it occurs once."""

    layers: int = 2
    heads: int = 4
    groups: int = 2
    head: int = 4
    hidden: int = 16
    ffn: int = 24
    vocabulary: int = 38
    experts: int = 0
    tied: bool = False
    bias: bool = False
    dtype: Any = np.float32

    def config(self, **changes: Any) -> dict[str, Any]:
        """Its config.json."""
        kind = ("qwen3_moe", "Qwen3Moe") if self.experts else ("qwen2", "Qwen2") if self.bias else ("llama", "Llama")
        sizes = {
            "hidden_size": self.hidden, "intermediate_size": self.ffn, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.groups, "head_dim": self.head,
            "vocab_size": self.vocabulary, "tie_word_embeddings": self.tied,
        }  # fmt: skip
        mixture = {"num_experts": self.experts, "moe_intermediate_size": self.ffn, "num_experts_per_tok": 1}
        return {
            "model_type": kind[0], "architectures": [f"{kind[1]}ForCausalLM"], **sizes,
            **(mixture if self.experts else {}), **changes,
        }  # fmt: skip

    def args(self, **changes: Any) -> dict[str, Any]:
        """What Megatron-LM records of it; None removes an argument."""
        recorded = {
            "num_layers": self.layers, "hidden_size": self.hidden, "num_attention_heads": self.heads,
            "group_query_attention": True, "num_query_groups": self.groups, "kv_channels": self.head,
            "ffn_hidden_size": self.ffn, "padded_vocab_size": self.vocabulary, "swiglu": True,
            "normalization": "RMSNorm", "add_bias_linear": False, "add_qkv_bias": self.bias,
            "num_experts": self.experts or None, "moe_ffn_hidden_size": self.ffn if self.experts else None,
            "untie_embeddings_and_output_weights": not self.tied,
        }  # fmt: skip
        return {name: value for name, value in (recorded | changes).items() if value is not None}

    def weights(self) -> Weights:
        """The model in the names of its Hugging Face file."""
        shapes = {"model.embed_tokens.weight": (self.vocabulary, self.hidden), "model.norm.weight": (self.hidden,)}
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in self._layer().items()}
        found, start = {}, 0
        for name, shape in shapes.items():
            size = int(np.prod(shape))
            found[name] = np.arange(start, start + size).reshape(shape).astype(self.dtype)
            start += size
        return found

    def _layer(self) -> dict[str, tuple[int, ...]]:
        rows = {"q_proj": self.heads * self.head, "k_proj": self.groups * self.head, "v_proj": self.groups * self.head}
        shapes: dict[str, tuple[int, ...]] = {f"self_attn.{part}.weight": (n, self.hidden) for part, n in rows.items()}
        shapes |= {f"self_attn.{part}.bias": (n,) for part, n in rows.items()} if self.bias else {}
        shapes["self_attn.o_proj.weight"] = (self.hidden, self.heads * self.head)
        shapes |= {f"self_attn.{part}_norm.weight": (self.head,) for part in "qk"} if self.experts else {}
        shapes |= {f"{norm}.weight": (self.hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
        for module in [f"mlp.experts.{number}" for number in range(self.experts)] or ["mlp"]:
            shapes |= {f"{module}.{part}_proj.weight": (self.ffn, self.hidden) for part in ("gate", "up")}
            shapes[f"{module}.down_proj.weight"] = (self.hidden, self.ffn)
        return shapes | ({"mlp.gate.weight": (self.experts, self.hidden)} if self.experts else {})

    def megatron(self) -> Weights:
        """The same as whole tensors in megatron-core's names, global layers, an entry per expert (TEGroupedMLP)."""
        weights = self.weights()
        full = {"embedding.word_embeddings.weight": weights["model.embed_tokens.weight"]}
        for layer in range(self.layers):
            inner = {name: weights[f"model.layers.{layer}.{name}"] for name in self._layer()}
            full |= {f"decoder.layers.{layer}.{name}": array for name, array in self._inside(inner).items()}
        full["decoder.final_layernorm.weight"] = weights["model.norm.weight"]
        return full | ({} if self.tied else {"output_layer.weight": weights["lm_head.weight"]})

    def _inside(self, layer: Weights) -> Weights:
        inside = {"self_attention.linear_proj.weight": layer["self_attn.o_proj.weight"]}
        for kind in ("weight", "bias") if self.bias else ("weight",):
            parts = [layer[f"self_attn.{part}_proj.{kind}"] for part in "qkv"]
            by_group = [part.reshape(self.groups, -1, *part.shape[1:]) for part in parts]
            grouped = np.concatenate(by_group, 1)
            inside[f"self_attention.linear_qkv.{kind}"] = grouped.reshape(-1, *grouped.shape[2:])
        inside["self_attention.linear_qkv.layer_norm_weight"] = layer["input_layernorm.weight"]
        if not self.experts:
            inside["mlp.linear_fc1.layer_norm_weight"] = layer["post_attention_layernorm.weight"]
            return inside | _mlp(layer, "mlp.{}_proj.weight", "mlp.{}.weight")
        inside["pre_mlp_layernorm.weight"] = layer["post_attention_layernorm.weight"]
        inside["mlp.router.weight"] = layer["mlp.gate.weight"]
        inside |= {f"self_attention.{part}_layernorm.weight": layer[f"self_attn.{part}_norm.weight"] for part in "qk"}
        for number in range(self.experts):
            inside |= _mlp(layer, f"mlp.experts.{number}.{{}}_proj.weight", f"mlp.experts.{{}}.weight{number}")
        return inside


def _mlp(layer: Weights, theirs: str, ours: str) -> Weights:
    gate, up, down = [layer[theirs.format(part)] for part in ("gate", "up", "down")]
    return {ours.format("linear_fc1"): np.concatenate([gate, up]), ours.format("linear_fc2"): down}


def shard(name: str, array: Array, rank: int, ranks: int) -> Array:
    """What a tensor-parallel rank holds of a whole tensor: rows, columns, rows of each half, or all of it."""
    if re.search(r"(linear_proj|linear_fc2)\.weight\d*$", name):
        return np.split(array, ranks, 1)[rank]
    if re.search(r"linear_fc1\.weight\d*$", name):
        return np.concatenate([np.split(half, ranks)[rank] for half in np.split(array, 2)])
    is_cut = re.search(r"(word_embeddings|output_layer|linear_qkv)\.(weight|bias)$", name) and len(array) > 1
    return np.split(array, ranks)[rank] if is_cut else array


def write_legacy(
    directory: Path,
    model: Decoder,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    full: Weights | None = None,
    args: Mapping[str, Any] | None = None,
    iteration: int = 10,
    version: float | None = 3.0,
    recorded: bool = True,
    rename: Callable[[str], str] = lambda name: name,
    beside: Mapping[str, bytes] | None = None,
) -> Path:
    """Write a run: `iter_0000010/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`, and `hf/config.json` beside it.

    full:     whole tensors in the place of the model's own. args: changes of what is recorded.
    recorded: whether `args` are saved at all. rename: what is stored for a name.
    beside:   opcodes of more entries of each file.
    """
    full = model.megatron() if full is None else full
    sizes = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "world_size": tp * pp * ep,
    }
    for stage in range(pp):
        for rank in range(tp):
            for expert in range(ep):
                held = _on_stage(full, stage, pp, model.layers)
                held = {name: shard(name, array, rank, tp) for name, array in held.items()}
                held = dict(_on_expert_rank(held, expert, model.experts // ep))
                place = directory / f"iter_{iteration:07d}" / directory_name(rank, stage, expert, pp, ep)
                place.mkdir(parents=True)
                write_rank(
                    place / FILE,
                    {rename(name): array for name, array in held.items()},
                    args=model.args(**sizes | dict(args or {})) if recorded else None,
                    iteration=iteration,
                    version=version,
                    beside=beside or {},
                )
    (directory / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    write_json(directory / "hf" / "config.json", model.config())
    return directory


def directory_name(tensor: int, stage: int, expert: int, pp: int, ep: int) -> str:
    """`mp_rank_TT`, with further numbers where there are such ranks."""
    return f"mp_rank_{tensor:02d}" + (f"_{stage:03d}" if pp > 1 else "") + (f"_{expert:03d}" if ep > 1 else "")


def _on_stage(full: Weights, stage: int, stages: int, layers: int) -> Weights:
    """The stage's tensors, its layers numbered from zero; a tied embedding lies on the last stage, too."""
    first, each = stage * layers // stages, layers // stages
    held: Weights = {}
    for name, array in full.items():
        found = re.fullmatch(r"(decoder\.layers\.)(\d+)(\..*)", name)
        if found:
            if first <= int(found[2]) < first + each:
                held[f"{found[1]}{int(found[2]) - first}{found[3]}"] = array
        elif stage == (0 if name.startswith("embedding.") else stages - 1):
            held[name] = array
    if stage == stages - 1 > 0 and "output_layer.weight" not in full:
        held["output_layer.weight"] = full["embedding.word_embeddings.weight"]
    return held


def _on_expert_rank(held: Weights, rank: int, each: int) -> Sequence[tuple[str, Array]]:
    """The rank's experts, numbered from zero, and all else."""
    kept = []
    for name, array in held.items():
        found = re.fullmatch(r"(.*\.experts\.linear_fc\d\.weight)(\d+)", name)
        if found is None:
            kept.append((name, array))
        elif rank * each <= int(found[2]) < (rank + 1) * each:
            kept.append((f"{found[1]}{int(found[2]) - rank * each}", array))
    return kept


def write_rank(
    path: Path,
    model: Mapping[str, Content],
    *,
    args: Mapping[str, Any] | None = None,
    iteration: int = 10,
    version: float | None = 3.0,
    beside: Mapping[str, bytes] | None = None,
) -> None:
    """One rank's file, as torch.save writes it. A shape in the place of a tensor is a hole of bf16."""
    file = RankFile(world(1), 0)
    if args is not None:
        file.add_opcodes("args", namespace(args))
    if version is not None:
        file.add_opcodes("checkpoint_version", value(version))
    file.add_opcodes("iteration", value(iteration))
    for name, entry in (beside or {}).items():
        file.add_opcodes(name, entry)
    tensors = {name: file.tensor(content) for name, content in model.items()}
    file.add_opcodes("model", opcodes.mapping(tensors))
    file.write(path)


def namespace(members: Mapping[str, Any]) -> bytes:
    """An argparse.Namespace, as opcodes."""
    return record(opcodes.named("argparse", "Namespace"), {name: value(member) for name, member in members.items()})


def value(plain: Any) -> bytes:
    """A plain value, as opcodes; bytes are opcodes already."""
    if isinstance(plain, bytes):
        return plain
    if plain is None or isinstance(plain, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[plain]
    if isinstance(plain, int):
        return opcodes.integer(plain)
    return b"G" + struct.pack(">d", plain) if isinstance(plain, float) else opcodes.text(plain)
