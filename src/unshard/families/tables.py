"""Pieces of tables that lead from another framework's names to those of Hugging Face files, whatever the framework."""

from __future__ import annotations

from typing import TypeAlias

from unshard.families.rules import Rule
from unshard.families.steps import Sections, Step

Rules: TypeAlias = tuple[Rule, ...]

HUB_LAYER = "model.layers.{layer}"
"""Where a layer of the decoder lies in the file."""

GROUPED = Sections(
    ("num_attention_heads*head_dim//num_key_value_heads", "head_dim", "head_dim"), groups="num_key_value_heads"
)
"""Rows of one matrix of queries, keys and values: for each key head its queries, the key, the value (Megatron-LM
`core/transformer/attention.py`; torchtitan `models/common/attention.py`)."""


def linear(at: str, to: str | tuple[str, ...], *steps: Step) -> Rules:
    """Weight and bias of a linear layer; with steps, the same for both: they must only touch rows."""
    to = (to,) if isinstance(to, str) else to
    return tuple([Rule(f"{at}.{kind}", tuple([f"{part}.{kind}" for part in to]), steps) for kind in ("weight", "bias")])
