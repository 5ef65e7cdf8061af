"""Names that training wrappers put around a model's own: taken off, one by one, and told."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from unshard.errors import ModelError
from unshard.families.naming.draft import Draft
from unshard.tensors import Value
from unshard.wrappers import COMPONENTS, strip_components

PREFIXES = ("module.", "pretrained_model.")
"""Attributes that DDP and TRL's value models hold the model by."""

_BESIDE = "v_head."
"""TRL's value head lies beside the wrapped model, not in it."""


def unwrap(draft: Draft, known: Collection[str] | None) -> None:
    """Take wrapper names off all tensors of a draft.

    `known` are the names that the architecture has; None where nothing knows them. Where all names lie in one common
    module that the architecture does not have, that level is taken off too, at most once.
    """
    found = [part for part in COMPONENTS if any(part in name.split(".") for name in draft.tensors)]
    if found:
        _rename_all(draft, strip_components)
        draft.note(f"wrapper names were taken off: {', '.join(found)}")
    for prefix in PREFIXES:
        _take_off(draft, prefix)
    if level := _extra_level(draft.tensors, known):
        _take_off(draft, level)


def _take_off(draft: Draft, prefix: str) -> None:
    """Remove a prefix that all names have, but for those that lie beside a wrapped model."""
    inside = [name for name in draft.tensors if not name.startswith(_BESIDE)]
    if inside and all(name.startswith(prefix) for name in inside):
        _rename_all(draft, lambda name: name.removeprefix(prefix))
        draft.note(f"the wrapper prefix {prefix!r} was taken off all names")


def _extra_level(names: Mapping[str, Value], known: Collection[str] | None) -> str | None:
    """The module, with its dot, that all names lie in though the architecture has no such level."""
    inside = [name for name in names if not name.startswith(_BESIDE)]
    prefix = inside[0].partition(".")[0] + "." if inside else ""
    if not prefix or not all(name.startswith(prefix) for name in inside):
        return None
    below = [name.removeprefix(prefix) for name in inside]
    if known is None:
        return prefix if prefix == "model." and any(name.startswith(("model.", "lm_head.")) for name in below) else None
    return prefix if sum(name in known for name in below) > sum(name in known for name in inside) else None


def _rename_all(draft: Draft, change: Callable[[str], str]) -> None:
    tensors: dict[str, Value] = {}
    origins: dict[str, tuple[str, ...]] = {}
    for name, value in draft.tensors.items():
        new = change(name)
        if new in tensors:
            message = f"{origins[new][0]} and {name} are both {new} without their wrappers"
            draft.problems.append(ModelError(message, hint="--names stored keeps all names as they are stored"))
            continue
        tensors[new], origins[new] = value.rename(new), (name,)
    draft.replace(tensors, origins)
