"""Megatron-LM's per-rank checkpoints, cut from whole tensors in plain torch.

`write_legacy` writes what `megatron/training/checkpointing.py` writes with `--ckpt-format torch`. `write_torch_dist`
writes distributed checkpoints, see `distributed.py`. Both are written from Megatron's source alone, so that the reader
under test and this writer cannot share a mistake.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.cutting import Full, cut_of, pad_vocabulary
from megatron.distributed import write_torch_dist
from megatron.naming import EXPERT, LAYER, Experts, local_experts, te_name

__all__ = ["place_layers", "write_legacy", "write_torch_dist"]


@dataclass(frozen=True)
class Layout:
    """Parallel sizes; `stages` are the global layer numbers of each stage, stage = vpp_rank * pp + pp_rank."""

    tp: int
    pp: int
    vpp: int
    ep: int
    etp: int
    stages: tuple[tuple[int, ...], ...]


def write_legacy(
    directory: Path,
    full: Full,
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    layers: Sequence[int] | None = None,
    args: Mapping[str, Any] | None = None,
    checkpoint_version: float | None = 3.0,
    te: bool = True,
    experts: Experts | None = None,
    padded_vocab_size: int | None = None,
    extra_state: bool = True,
    iteration: int | None = 10,
    file_name: str = "model_optim_rng.pt",
    dims: Mapping[str, int] | None = None,
    beside: Mapping[str, Any] | None = None,
    arrange: Callable[[dict[str, torch.Tensor]], Any] | None = None,
) -> Path:
    """Write `iter_0000010/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt` below `directory`; returns `iter_0000010`.

    full:    whole tensors under the local spec's names (`input_layernorm`, `pre_mlp_layernorm`,
             `mlp.experts.local_experts.{global e}.linear_fc1.weight`), with global layer numbers. Where
             `output_layer.weight` is missing the embedding is tied.
    etp:     tensor parallelism of the experts, `tp` by default.
    layers:  the number of layers of each stage, stage = vpp_rank * pp + pp_rank; even by default.
    args:    saved in an `argparse.Namespace`, over the parallel sizes; None: none are saved.
    checkpoint_version: below 2, the rows of QKV are put as those versions put them (needs `num_attention_heads` in
             args and no grouped queries); None: the key is left out.
    te:      TransformerEngine's names, else the local spec's.
    experts: by default "te_grouped" with `te`, else "sequential".
    padded_vocab_size: the embeddings get rows of noise up to this number.
    iteration: None writes the `mp_rank_*` directories into `directory` itself.
    dims:    the dimension that is cut, for ends of names that the usual table does not cut.
    beside:  more entries of each file (`optimizer`, `rng_state`).
    arrange: makes what is stored of each stage's flat state dict, such as the nested dicts of old versions.
    """
    number_of_layers = 1 + max((int(found[2]) for found in map(LAYER.fullmatch, full) if found), default=-1)
    stages = place_layers(number_of_layers, pp * vpp, layers)
    layout = Layout(tp, pp, vpp, ep, etp or tp, stages)
    full = pad_vocabulary(full, padded_vocab_size)
    root = directory if iteration is None else directory / f"iter_{iteration:07d}"
    saved = None if args is None else argparse.Namespace(**(_sizes(layout, len(stages) > pp) | dict(args)))
    kind: Experts = experts or ("te_grouped" if te else "sequential")
    for pp_rank in range(pp):
        for tp_rank, ep_rank, etp_rank in _saving_ranks(layout):
            chunks = []
            for vpp_rank in range(vpp):
                stage = _stage_tensors(full, layout, vpp_rank * pp + pp_rank)
                held = _cut(stage, full, layout, tp_rank, etp_rank, dims)
                held = _old_qkv(held, checkpoint_version, args, tp)
                held = local_experts(held, ep=ep, ep_rank=ep_rank, kind=kind)
                held = {te_name(name, stage) if te else name: tensor for name, tensor in held.items()}
                held = _number_from_zero(held, stages[vpp_rank * pp + pp_rank])
                if extra_state:
                    held |= _extra_states(held)
                chunks.append(arrange(held) if arrange else held)
            state: dict[str, Any] = {} if saved is None else {"args": saved}
            if checkpoint_version is not None:
                state["checkpoint_version"] = checkpoint_version
            state |= {"iteration": iteration or 0} | dict(beside or {})
            state |= {"model": chunks[0]} if vpp == 1 else {f"model{n}": chunk for n, chunk in enumerate(chunks)}
            place = root / rank_directory(layout, tp_rank, pp_rank, ep_rank)
            place.mkdir(parents=True)
            torch.save(state, place / file_name)
    if iteration is not None:
        (directory / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return root


def place_layers(layers: int, stages: int, counts: Sequence[int] | None) -> tuple[tuple[int, ...], ...]:
    """The layer numbers of each stage, in the order that the model runs through them."""
    counts = counts or [layers // stages] * stages
    if sum(counts) != layers or len(counts) != stages:
        raise ValueError(f"{layers} layers do not lie on {stages} stages as {list(counts)}")
    starts = [sum(counts[:stage]) for stage in range(stages)]
    return tuple(tuple(range(start, start + count)) for start, count in zip(starts, counts, strict=True))


def rank_directory(layout: Layout, tp_rank: int, pp_rank: int, ep_rank: int) -> str:
    """`mp_rank_TT`, with `_PPP` under pipeline and `_EEE` under expert parallelism."""
    name = f"mp_rank_{tp_rank:02d}"
    if layout.pp > 1:
        name += f"_{pp_rank:03d}"
    return f"{name}_{ep_rank:03d}" if layout.ep > 1 else name


def _sizes(layout: Layout, virtual: bool) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if virtual else None,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "num_layers": sum(len(stage) for stage in layout.stages),
    }


def _saving_ranks(layout: Layout) -> Iterable[tuple[int, int, int]]:
    """(tensor, expert, expert tensor) ranks of the processes of one pipeline stage that save.

    Megatron numbers the processes twice: for dense layers by `tp` fastest, for experts by `etp`, then `ep`. Not every
    pair of ranks occurs, and a pair that occurred with two expert tensor ranks could not be told apart on disk.
    """
    seen: dict[tuple[int, int], int] = {}
    for process in range(math.lcm(layout.tp, layout.etp * layout.ep)):
        tp_rank, ep_rank = process % layout.tp, process // layout.etp % layout.ep
        etp_rank = process % layout.etp
        if seen.setdefault((tp_rank, ep_rank), etp_rank) != etp_rank:
            raise ValueError(f"two processes would save into the directory of ranks {tp_rank}, {ep_rank}")
    return [(tp_rank, ep_rank, etp_rank) for (tp_rank, ep_rank), etp_rank in seen.items()]


def _stage_tensors(full: Full, layout: Layout, stage: int) -> dict[str, torch.Tensor]:
    """What one stage holds: the embedding on the first, norm, head and MTP on the last, a tied copy on both."""
    first, last = stage == 0, stage == len(layout.stages) - 1
    has_mtp = any(re.search(r"(^|\.)mtp\.layers\.", name) for name in full)
    held: dict[str, torch.Tensor] = {}
    for name, tensor in full.items():
        layer = LAYER.fullmatch(name)
        if layer and not name.startswith("vision_model."):
            mine = int(layer[2]) in layout.stages[stage]
        elif re.search(r"(^|\.)(decoder\.final_layernorm\.|output_layer\.|mtp\.)", name):
            mine = (last and not name.startswith("vision_model.")) or (first and name.startswith("vision_model."))
        else:
            mine = first or (last and has_mtp and "embedding." in name)
        if mine:
            held[name] = tensor
    if last and not first:
        for name in [name for name in full if name.endswith("embedding.word_embeddings.weight")]:
            head = name.replace("embedding.word_embeddings", "output_layer")
            held.setdefault(head, full[name])
    return held


def _cut(
    stage: Full, full: Full, layout: Layout, tp_rank: int, etp_rank: int, dims: Mapping[str, int] | None
) -> dict[str, torch.Tensor]:
    held = {}
    for name, tensor in stage.items():
        rank, size = (etp_rank, layout.etp) if EXPERT.fullmatch(name) else (tp_rank, layout.tp)
        cut = cut_of(name, dict(full) | dict(stage), dims)
        held[name] = tensor.clone() if cut is None else cut.piece(tensor, rank, size).clone()
    return held


def _old_qkv(
    held: dict[str, torch.Tensor], version: float | None, args: Mapping[str, Any] | None, tp: int
) -> dict[str, torch.Tensor]:
    """Rows of QKV before version 2: [3, heads, size] in version 0 (none saved), [heads, size, 3] in version 1."""
    if version is not None and version >= 2:
        return held
    heads = (args or {})["num_attention_heads"] // tp
    put = dict(held)
    for name in held:
        if re.search(r"\.linear_qkv\.(weight|bias)$", name):
            grouped = held[name].unflatten(0, (heads, 3, -1))
            old = grouped.transpose(0, 1) if not version else grouped.transpose(1, 2)
            put[name] = old.flatten(0, 2).contiguous()
    return put


def _number_from_zero(held: Full, layers: Sequence[int]) -> dict[str, torch.Tensor]:
    numbered = {}
    for name, tensor in held.items():
        found = None if name.startswith("vision_model.") else LAYER.fullmatch(name)
        numbered[f"{found[1]}{int(found[2]) - layers[0]}{found[3]}" if found else name] = tensor
    return numbered


def _extra_states(held: Full) -> dict[str, torch.Tensor | None]:
    """What is stored beside linear layers for FP8: nothing, or bytes."""
    linears = [name for name in held if re.search(r"(\.linear_(qkv|proj|fc1|fc2)|output_layer)\.weight\d*$", name)]
    return {
        f"{name.rpartition('.')[0]}._extra_state": None if "proj" in name else torch.zeros(0, dtype=torch.uint8)
        for name in linears
    }
