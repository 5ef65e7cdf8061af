"""Buffers that some versions of a framework stored, though every version computes them anew."""

from __future__ import annotations

import re

from unshard.families.naming.draft import Draft

_RECOMPUTED = (
    (re.compile(r"(?:.*\.)?rotary\w*(?:\.\w+)*\.(?:original_)?inv_freq"), 1),
    (re.compile(r"(?:.*\.)?(?:attn|attention)\.bias"), 4),
    (re.compile(r"(?:.*\.)?(?:attn|attention)\.masked_bias"), 0),
)
"""(name, number of axes): rotary frequencies; causal masks of GPT-2, GPT-Neo and GPT-NeoX and their fill value."""


def drop_recomputed(draft: Draft, kept: frozenset[str] = frozenset()) -> None:
    """Drop known non-persistent buffers, but for the names in `kept`, and say so."""
    found = [
        name
        for name, value in draft.tensors.items()
        if name not in kept
        and any(pattern.fullmatch(name) and len(value.shape) == axes for pattern, axes in _RECOMPUTED)
    ]
    for name in found:
        draft.drop(name, "a buffer that every version of the model computes anew")
    if found:
        draft.note("buffers that the model computes anew were left out", tuple(found))
