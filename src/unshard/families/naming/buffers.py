"""Tensors of a state dict that are no parameters: those that every version computes anew, and a training's own."""

from __future__ import annotations

import re
from collections.abc import Collection

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


def find_own(draft: Draft, parameters: Collection[str]) -> tuple[str, ...]:
    """Names of tensors that cannot be parameters under wrong names, for none of these `parameters` ends as they do.

    They are persistent buffers that the training code registered, scales of quantised weights, and the like.
    """
    endings = {_ending(name) for name in parameters}
    return tuple([name for name in draft.tensors if _ending(name) not in endings])


def _ending(name: str) -> str:
    return name.rpartition(".")[2]
