"""What lies on the disk, as a catalog."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from unshard.errors import UnshardError
from unshard.options import Weights
from unshard.tensors import SourceFile, Tensor

Shape: TypeAlias = tuple[int, ...]
Level: TypeAlias = Literal["note", "warning"]
Dialect: TypeAlias = Literal["huggingface", "megatron", "torchtitan"]
"""Whose names and layouts the tensors have: the model's in transformers, Megatron's (see `formats.megatron`), or
torchtitan's own models'."""


@dataclass(frozen=True, slots=True)
class Asset:
    """A file beside the weights that belongs to the model (config, tokenizer, code): copied byte for byte.

    `path` is where it goes in the output, relative, with forward slashes. `size` is in bytes.
    """

    path: str
    file: SourceFile
    size: int


@dataclass(frozen=True, slots=True)
class Note:
    """A line of the report: something that a person must be able to know, and the tensors it is about."""

    text: str
    tensors: tuple[str, ...] = ()
    level: Level = "note"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A catalog of tensors made of chunks, as a format found them, under the names that are stored.

    format:   the format's registered name (`fsdp`, `full`, `huggingface`, …).
    title:    one line for people: "FSDP2 DTensor, 4 ranks, mesh (fsdp=4)".
    roots:    where the roots lie that extents and assets refer to.
    tensors:  stored name → tensor, in stored order.
    config:   the parsed config.json that belongs to it, if any.
    assets:   files to copy, config.json among them.
    world_size, mesh: what the ranks recorded; None or empty where there are no ranks.
    placements: how often each placement occurs, for `inspect`: "Shard(0)" → 12.
    adapter:  what the checkpoint says of its LoRA adapters beside the tensors: `lora_train_meta.json` or
              `adapter_config.json`, parsed; None if neither is there.
    dialect:  whose names the tensors have; `families` translates all others into those of transformers.
    facts:    what the training framework recorded of the model's architecture, under Megatron-LM's argument names
              (`num_query_groups`, `apply_layernorm_1p`, …), as plain JSON values; empty where nothing was recorded.
    skipped:  entries of the state dict that are no tensors, with the reason.
    weights:  which copy of the parameters was read, where the checkpoint keeps two; None where it keeps one.
    excluded: parameters that the model has and that were left out when it was saved, with their shapes: a base model
              must give them (`--fill-from`), or there is nothing to merge.
    problems: errors that forbid a merge, all of them; `inspect` shows them.
    """

    format: str
    title: str
    roots: Mapping[str, Path]
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any] | None = None
    assets: tuple[Asset, ...] = ()
    world_size: int | None = None
    mesh: tuple[tuple[str, int], ...] = ()
    placements: Mapping[str, int] = field(default_factory=dict)
    adapter: Mapping[str, Any] | None = None
    dialect: Dialect = "huggingface"
    facts: Mapping[str, Any] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    weights: Weights | None = None
    excluded: Mapping[str, Shape] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    problems: tuple[UnshardError, ...] = ()

    @property
    def size_in_bytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        return sum(tensor.size_in_bytes for tensor in self.tensors.values())
