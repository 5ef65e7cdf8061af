"""Names that training wrappers put around a model's own: taken off, one by one, and told."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

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
    module that the architecture does not have, that one is taken off too.
    """
    found = [part for part in COMPONENTS if any(part in name.split(".") for name in draft.tensors)]
    if found:
        _rename_all(draft, strip_components)
        draft.note(f"wrapper names were taken off: {', '.join(found)}")
    for prefix in PREFIXES:
        _take_off(draft, prefix)
    if level := extra_level(draft.tensors, known):
        _take_off(draft, level)


def _take_off(draft: Draft, prefix: str) -> None:
    """Remove a prefix that all names have, but for those that lie beside a wrapped model."""
    inside = [name for name in draft.tensors if not name.startswith(_BESIDE)]
    if inside and all(name.startswith(prefix) for name in inside):
        _rename_all(draft, lambda name: name.removeprefix(prefix))
        draft.note(f"the wrapper prefix {prefix!r} was taken off all names")


def extra_level(names: Collection[str], known: Collection[str] | None) -> str | None:
    """The module, with its dot, that all names lie in though the architecture has no such level."""
    inside = [name for name in names if not name.startswith(_BESIDE)]
    levels = list(_common_levels(inside))
    if known is None:
        below = [name.removeprefix("model.") for name in inside]
        return (
            "model." if "model." in levels and any(name.startswith(("model.", "lm_head.")) for name in below) else None
        )
    fitting = {level: sum([name.removeprefix(level) in known for name in inside]) for level in ("", *levels)}
    best = max(fitting, key=lambda level: (fitting[level], -len(level)))
    return best or None


def _common_levels(names: Sequence[str]) -> Iterator[str]:
    """The modules that all names lie in, with their dots, the outermost first."""
    paths = [name.split(".")[:-1] for name in names]
    level = ""
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            return
        level += f"{parts[0]}."
        yield level


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
