"""Whether a state dict has the names of torchtitan's own models, which are those of Meta's Llama."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PROJECTION = re.compile(
    r"layers\.[0-9]{1,9}\.attention\.(qkv_linear\.(wq|wk|wv|wqkv)|wq|wk|wq_a|wq_b|wkv_a|wkv_b)\..+"
)
"""Projections of attention (pytorch/torchtitan, `models/common/attention.py`, `models/deepseek_v3/model.py`).

They are the mark: norms and gated MLPs are called alike in InternLM 2 and in gpt-fast, whose one `attention.wqkv` lies
otherwise.
"""


def is_torchtitan(names: Iterable[str]) -> bool:
    """Whether names of a model's state dict are those of torchtitan's models, rotary dimensions in its order.

    Also for the files of Meta's Llama (`consolidated.00.pth`) and Mistral, where torchtitan has its names and layouts
    from. torchtitan's models that wrap transformers have the names of those.
    """
    return any(_PROJECTION.fullmatch(name) for name in names)
