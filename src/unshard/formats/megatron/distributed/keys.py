"""The keys of distributed checkpoints, as far as they differ from the names of megatron-core's model.

Facts: megatron-core `transformer/transformer_block.py`, `transformer/moe/experts.py`,
`extensions/transformer_engine.py` (`sharded_state_dict` of each) and `transformer/fsdp_dtensor_checkpoint.py`.
"""

from __future__ import annotations

import re

_STACKED = re.compile(r"((?:.*?\.)?layers)\.(?!\d+\.)(.+)")
_EXPERTS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(.+?\.experts)\.experts\.(\d+)\.(.+)"), r"\1.local_experts.\2.\3"),
    (
        re.compile(r"(.+?\.experts)\.(?:experts\.)?(linear_fc[12]\.(?:weight|bias))(\d+)(_[wv])?"),
        r"\1.local_experts.\3.\2\4",
    ),
    (re.compile(r"(.+?\.experts)\.experts\.(.+)"), r"\1.\2"),
)
"""How experts are named, each with the canonical name: singleton keys, TEGroupedMLP's, and all experts at once."""


def split_layers(key: str) -> tuple[str, str] | None:
    """`decoder.layers.mlp.linear_fc1.weight` → (`decoder.layers`, `mlp.linear_fc1.weight`), where layers are stacked.

    None where the key has a layer's number, or no layers at all.
    """
    found = _STACKED.fullmatch(key)
    return (found[1], found[2]) if found else None


def rename_experts(key: str) -> str:
    """A key under which all experts are stored, or one, by its canonical name (see `stack_experts`)."""
    for pattern, name in _EXPERTS:
        if found := pattern.fullmatch(key):
            return found.expand(name)
    return key
