"""Megatron-Core's distributed checkpoints (`torch_dist`), by torch's own `FileSystemWriter`.

The keys and boxes are those of megatron-core's `sharded_state_dict` methods (`transformer_block.py`, `mlp.py`,
`moe/experts.py`, `gated_delta_net.py`), worked out here from whole tensors in one process: each tensor becomes the
pieces that the ranks of the run would have saved, in files named after those ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from megatron.chunks import Piece, save_pieces
from megatron.cutting import Cut, Full, cut_of, pad_vocabulary
from megatron.naming import EXPERT, LAYER, te_name

_DELTA_NET_PARTS = ("query", "key", "value", "z", "beta", "alpha")


def write_torch_dist(
    directory: Path,
    full: Full,
    *,
    tp: int = 1,
    pp: int = 1,
    etp: int | None = None,
    homogeneous: bool = True,
    singleton: bool = False,
    te: bool = True,
    args: Mapping[str, Any] | None = None,
    common: Literal["file", "item"] = "file",
    padded_vocab_size: int | None = None,
    prefix: str = "",
    optimizer: bool = False,
    extra_state: bool = True,
    iteration: int | None = 10,
    files_per_rank: int = 2,
    dims: Mapping[str, int] | None = None,
) -> Path:
    """Write `iter_0000010/{.metadata, __R_N.distcp, common.pt, metadata.json}` below `directory`; returns it.

    full:    whole tensors as in `write_legacy`.
    homogeneous: all layers under one key, stacked over a leading axis; else a key per global layer.
    singleton: `singleton_local_shards`: a key per layer and expert, gate and up as `_w` and `_v`.
    te:      TransformerEngine's spec, else the local one, which in layers of experts files the norm behind attention
             under `mlp.linear_fc1.layer_norm_weight`, and keeps its own names where attention is latent.
    args:    an `argparse.Namespace` in the common state; None: none there, as verl and NeMo leave it.
    common:  the common state in `common.pt`, or as newer versions write it in the entry `common_state/shard_0_1`.
    prefix:  before each key of the model (`module.` in NeMo 2).
    iteration: None writes into `directory` itself.
    """
    full = pad_vocabulary(full, padded_vocab_size)
    root = directory if iteration is None else directory / f"iter_{iteration:07d}"
    pieces = [piece for name in full for piece in _pieces(name, full, tp, etp or tp, te, singleton, dims)]
    objects = _extra_states(pieces) if te and extra_state else {}
    counts = Counter(block for block, _ in {found.group(1, 2) for found in map(LAYER.fullmatch, full) if found})
    pieces = [_on_stage(piece, counts, max(tp, etp or tp), pp) for piece in pieces]
    if homogeneous and not singleton:
        pieces = [_stack_layers(piece, counts) for piece in pieces]
    pieces = [dataclasses.replace(piece, key=f"{prefix}{piece.key}") for piece in pieces]
    if optimizer:
        pieces += [
            _optimizer_piece(piece, kind) for piece in pieces for kind in ("exp_avg", "exp_avg_sq", "fp32_param")
        ]
    state = _common_state(iteration, singleton, homogeneous)
    if args is not None:
        sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
        state["args"] = argparse.Namespace(**(sizes | {"num_layers": counts["decoder.layers."]} | dict(args)))
    root.mkdir(parents=True)
    backend: dict[str, str | int] = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    if common == "file":
        torch.save(state, root / "common.pt")
        backend |= {"common_backend": "torch", "common_backend_version": 1}
    else:
        objects["common_state/shard_0_1"] = _serialized([state])
    save_pieces(root, pieces, objects, files_per_rank=files_per_rank)
    (root / "metadata.json").write_text(json.dumps(backend))
    if iteration is not None:
        (directory / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return root


def _pieces(
    name: str, full: Full, tp: int, etp: int, te: bool, singleton: bool, dims: Mapping[str, int] | None
) -> list[Piece]:
    """What the ranks save of one whole tensor."""
    expert = EXPERT.fullmatch(name)
    key = te_name(name, full) if te else _local_key(name, full)
    cut, size = cut_of(name, full, dims), etp if expert else tp
    pieces = [
        piece for part, whole, part_cut in _parts(key, full[name], cut, singleton)
        for piece in _shards(part, whole, part_cut, size)
    ]  # fmt: skip
    if expert is None:
        return pieces
    if singleton:
        return [dataclasses.replace(piece, key=piece.key.replace(".local_experts.", ".experts.")) for piece in pieces]
    alike = re.compile(rf"{re.escape(expert[1])}\.local_experts\.\d+\.{expert[3]}\.{expert[4]}")
    count = sum(alike.fullmatch(other) is not None for other in full)
    stacked = re.sub(r"\.local_experts\.\d+\.", ".experts.", key)
    return [dataclasses.replace(piece, key=stacked).stacked(int(expert[2]), count) for piece in pieces]


def _parts(
    key: str, tensor: torch.Tensor, cut: Cut | None, singleton: bool
) -> list[tuple[str, torch.Tensor, Cut | None]]:
    """The sections that are stored under keys of their own: those of a gated delta net, `_w` and `_v` of an MLP."""
    if cut is not None and re.search(r"\.(in_proj|conv1d)\.weight$", key):
        names = [f"{key}.{part}" for part in _DELTA_NET_PARTS]
    elif cut is not None and len(cut.sections) == 2 and singleton:
        names = [f"{key}_w", f"{key}_v"]
    else:
        return [(key, tensor, cut)]
    sections = tensor.split(cut.sections)
    return [(name, rows, Cut(0, (len(rows),))) for name, rows in zip(names, sections, strict=False)]


def _shards(key: str, tensor: torch.Tensor, cut: Cut | None, size: int) -> list[Piece]:
    shape = tuple(tensor.shape)
    if cut is None:
        return [Piece(key, shape, (0,) * tensor.dim(), tensor, 0)]
    return [
        Piece(key, shape, tuple(begin if dim == cut.dim else 0 for dim in range(tensor.dim())), part, rank)
        for rank in range(size)
        for begin, part in _places(key, tensor, cut, rank, size)
    ]


def _places(key: str, tensor: torch.Tensor, cut: Cut, rank: int, size: int) -> list[tuple[int, torch.Tensor]]:
    """Where the pieces of a rank are stored: in their places of the whole, but for some rows of adapters.

    Magnitudes of DoRA, and adapters of a delta net's projection, are stored rank by rank. Adapters of gate or up alone
    are halved as if they were of both (Megatron-Bridge `peft/dora_layers.py`, `peft/utils.py`).
    """
    if re.search(r"\.adapter\.weight_magnitude$|\.in_proj\.adapter\.linear_out\.weight$", key):
        own = cut.piece(tensor, rank, size)
        return [(rank * len(own), own)]
    if re.search(r"\.adapter_(gate|up)\.linear_out\.weight$", key):
        first, second = cut.piece(tensor, rank, size).chunk(2)
        return [(rank * len(first), first), ((size + rank) * len(first), second)]
    return cut.parts(tensor, rank, size)


def _local_key(name: str, full: Full) -> str:
    """The local spec's `sharded_state_dict_keys_map`, which layers with latent attention lack."""
    layer = re.match(r".*\.layers\.\d+\.(transformer_layer\.)?", name)
    if layer is None or f"{layer[0]}self_attention.linear_qkv.weight" not in full:
        return name
    name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    return name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")


def _on_stage(piece: Piece, counts: Mapping[str, int], ranks: int, pp: int) -> Piece:
    """The piece as saved by one of the `ranks` ranks of its layer's pipeline stage; all else by the first stage."""
    found = LAYER.fullmatch(piece.key)
    stage = int(found[2]) * pp // counts[found[1]] if found else 0
    return dataclasses.replace(piece, rank=stage * ranks + piece.rank)


def _stack_layers(piece: Piece, counts: Mapping[str, int]) -> Piece:
    found = LAYER.fullmatch(piece.key)
    if found is None:
        return piece
    stacked = dataclasses.replace(piece, key=found[1] + found[3].removeprefix("."))
    return stacked.stacked(int(found[2]), counts[found[1]])


def _optimizer_piece(piece: Piece, kind: str) -> Piece:
    return dataclasses.replace(piece, key=f"optimizer.state.{kind}.{piece.key}", data=piece.data.float())


def _extra_states(pieces: list[Piece]) -> dict[str, bytes]:
    """The objects that TransformerEngine's linear layers store, empty without FP8."""
    linears = [piece.key for piece in pieces if re.search(r"\.linear_(qkv|proj|fc[12])\.weight$", piece.key)]
    return {f"{key.removesuffix('weight')}_extra_state/shard_0_1": _serialized([io.BytesIO()]) for key in linears}


def _common_state(iteration: int | None, singleton: bool, homogeneous: bool) -> dict[str, Any]:
    metadata = {"singleton_local_shards": singleton, "non_homogeneous_layers": not homogeneous}
    return {"iteration": iteration or 0, "checkpoint_version": 3.0, "content_metadata": metadata}


def _serialized(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
