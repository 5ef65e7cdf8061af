"""The ways in which torch.distributed.checkpoint saves: one function per way, called on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

State = dict[str, Any]


def nest(root: str, state: State, optimizer: State | None) -> State:
    """The tree that a trainer saves: the model at `root`, the optimizer as its sibling, a number and a text."""
    tree: State = dict(state)
    if optimizer is not None and not root:
        tree |= {"optimizer": optimizer}
    if root:
        *outer, own = root.split(".")
        tree = {own: state, "step": 7, "note": "a text"} | ({"optim": optimizer} if optimizer is not None else {})
        for name in reversed(outer):
            tree = {name: tree}
    return tree


def step_optimizer(model: nn.Module) -> State:
    """The sharded state of AdamW after a step that changes nothing."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return get_optimizer_state_dict(model, optimizer)


def _writer(directory: Path, **options: Any) -> dcp.FileSystemWriter:
    return dcp.FileSystemWriter(directory, **options)


def plain(directory: Path, tree: State) -> None:
    """As most trainers do."""
    dcp.save(tree, checkpoint_id=directory)


def threads(directory: Path, tree: State) -> None:
    """Three threads per rank, each with a file of its own."""
    dcp.save(tree, storage_writer=_writer(directory, thread_count=3))


def rank_metadata(directory: Path, tree: State) -> None:
    """Without a word between the ranks: `__{rank}.metadata` instead of `.metadata`."""
    dcp.save(tree, storage_writer=_writer(directory), use_collectives=False)


def safetensors(directory: Path, tree: State) -> None:
    """Files are of safetensors, which has no place for what is no tensor."""
    writer = _writer(directory, serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save({"model": tree["model"]}, storage_writer=writer)


def zstd(directory: Path, tree: State) -> None:
    """Each item goes through torch's own extension."""
    dcp.save(tree, storage_writer=_writer(directory, _extensions=[ZStandard()]))


def asynchronous(directory: Path, tree: State) -> None:
    """From a copy in memory, in a thread."""
    dcp.async_save(tree, checkpoint_id=directory).result()


def hf_shards(directory: Path, tree: State, files: int = 1, **options: Any) -> None:
    """By torch's HuggingFaceStorageWriter: `files` safetensors files per rank."""
    mapping = {name: index * files // len(tree) + 1 for index, name in enumerate(tree)}
    options = {"save_distributed": True} | options
    writer = dcp.HuggingFaceStorageWriter(str(directory), fqn_to_index_mapping=mapping, **options)
    dcp.save(tree, storage_writer=writer)


def hf_two_files(directory: Path, tree: State) -> None:
    """Two files per rank."""
    hf_shards(directory, tree, files=2)


def hf_consolidated(directory: Path, tree: State) -> None:
    """Shards in `sharded/`, and what torch makes of them above."""
    hf_shards(directory, tree, enable_consolidation=True)


def hf_whole(directory: Path, tree: State) -> None:
    """Rank 0 alone, which holds whole tensors."""
    if dist.get_rank() == 0:
        mapping = dict.fromkeys(tree, 1)
        dcp.save(tree, storage_writer=dcp.HuggingFaceStorageWriter(str(directory), mapping), no_dist=True)


SAVERS: dict[str, Callable[[Path, State], None]] = {
    "plain": plain,
    "threads": threads,
    "rank_metadata": rank_metadata,
    "safetensors": safetensors,
    "zstd": zstd,
    "async": asynchronous,
    "hf_shards": hf_shards,
    "hf_two_files": hf_two_files,
    "hf_consolidated": hf_consolidated,
    "hf_whole": hf_whole,
}
