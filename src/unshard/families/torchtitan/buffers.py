"""What torchtitan stores beside the parameters that the model in transformers has."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from unshard.checkpoint import Note
from unshard.errors import ModelError
from unshard.families.rules import Rule, find_rule
from unshard.families.sizes import Sizes
from unshard.tensors import Tensor, Value

_COMPUTED = re.compile(r"(.+\.)?(freqs_cis|rope_cache|rope\.(freqs|cache)|tokens_per_expert(_E)?)")
"""Angles of rotary positions and counters, which models make anew (`register_buffer` in `torchtitan/models`).

`rope.freqs` is that of Meta's files.
"""
_ANGLES = ("freqs_cis", "rope.freqs")
"""Of those, the ones that have an angle for each pair of a head's dimensions, along the last axis."""

_BALANCE = re.compile(r".+\.moe\.expert_bias(_E)?")
"""The bias by which a router chooses experts, where training balances them so (`models/common/moe.py`)."""


def leave_out(tensors: Mapping[str, Value], rules: Sequence[Rule]) -> tuple[dict[str, Value], list[Note]]:
    """The tensors without what models make anew, and without biases that no rule has a place for."""
    computed = [name for name in tensors if _COMPUTED.fullmatch(name)]
    balance = [name for name in tensors if _BALANCE.fullmatch(name) and find_rule(name, rules) is None]
    notes = []
    if computed:
        notes.append(Note("left out, for models compute them: rotary angles and counters", tuple(computed)))
    if balance:
        text = (
            "left out, for the model has no place for them: biases that balanced the experts in training. Where they "
            "are not 0, it chooses other experts than training did"
        )
        notes.append(Note(text, tuple(balance), "warning"))
    dropped = {*computed, *balance}
    return {name: tensor for name, tensor in tensors.items() if name not in dropped}, notes


def compare_angles(tensors: Mapping[str, Tensor], sizes: Sizes) -> ModelError | None:
    """The stored angles against `head_dim`: the only thing beside the config that tells how rows make heads."""
    width = sizes.known("head_dim")
    for name, tensor in tensors.items():
        if width is None or not name.endswith(_ANGLES) or not tensor.shape or 2 * tensor.shape[-1] == width:
            continue
        return ModelError(
            f"config.json makes heads of {width} rows, but {name} has angles for heads of {2 * tensor.shape[-1]}",
            hint="give the config.json of the model that was trained with --config DIR",
        )
    return None
