"""What training recorded against what the tensors are: args that contradict the shapes belong to another model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from unshard.errors import IncompleteError, UnshardError
from unshard.formats.megatron.ranks.sizes import ONE_RUN
from unshard.tensors import Tensor
from unshard.words import items_in_lines

_SIZES: tuple[tuple[str, int, str], ...] = (
    (r"embedding\.word_embeddings\.weight", 0, "padded_vocab_size"),
    (r"embedding\.word_embeddings\.weight", 1, "hidden_size"),
    (r"decoder\.layers\.\d+\.mlp\.linear_fc2\.weight", 1, "ffn_hidden_size"),
    (r"decoder\.layers\.\d+\.mlp\.experts\.linear_fc2\.weight", 0, "num_experts"),
    (r"decoder\.layers\.\d+\.mlp\.experts\.linear_fc2\.weight", 2, "moe_ffn_hidden_size"),
    (
        r"decoder\.layers\.\d+\.mlp\.shared_experts\.linear_fc2\.weight",
        1,
        "moe_shared_expert_intermediate_size",
    ),
)
"""Pattern of a name, axis, and the argument that is the size of the axis."""
_COMPILED = tuple([(re.compile(rf"(?:language_model\.)?{pattern}"), axis, name) for pattern, axis, name in _SIZES])
_LAYER = re.compile(r"(?:language_model\.)?decoder\.layers\.(\d+)\..*")


def check_recorded(
    tensors: Mapping[str, Tensor], facts: Mapping[str, Any], *, all_there: bool
) -> Iterator[UnshardError]:
    """One problem with all contradictions. `all_there`: whether the directories of all ranks are."""
    found: dict[tuple[str, int, int], str] = {}
    layers: set[int] = set()
    for name, tensor in tensors.items():
        if match := _LAYER.fullmatch(name):
            layers.add(int(match[1]))
        for pattern, axis, argument in _COMPILED:
            said = facts.get(argument)
            if type(said) is int and tensor.ndim > axis and tensor.shape[axis] != said and pattern.fullmatch(name):
                found.setdefault((argument, said, tensor.shape[axis]), f"`{name}` is {list(tensor.shape)}")
    lines = [f"args.{argument} is {said}, but {shape}" for (argument, said, _), shape in found.items()]
    said = facts.get("num_layers")
    if all_there and type(said) is int and layers and len(layers) != said:
        lines.append(f"args.num_layers is {said}, but {len(layers)} layers are there")
    if lines:
        yield IncompleteError(
            f"args contradict the tensors:\n{items_in_lines(lines)}",
            hint=ONE_RUN,
        )
