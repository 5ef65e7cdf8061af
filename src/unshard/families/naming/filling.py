"""Parameters that a checkpoint was saved without: told, or taken from the base model that training began with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unshard.checkpoint import Shape
from unshard.errors import IncompleteError, UnshardError
from unshard.families.naming.checks import compare
from unshard.families.naming.draft import Draft
from unshard.families.naming.lists import summarize
from unshard.families.naming.ties import is_tied_head
from unshard.model import Base
from unshard.tensors import Tensor, Value
from unshard.words import count_in_words, items_in_words


def tell_excluded(excluded: Mapping[str, Shape], hint: str) -> UnshardError:
    """The error of a checkpoint that records which parameters it was saved without, where nobody gives them."""
    lines = [f"{line} ({count:,})" if count > 1 else line for line, count in summarize(excluded).items()]
    head = f"the checkpoint was saved without {count_in_words(len(excluded), 'parameter')}"
    return IncompleteError(f"{head}:\n  " + "\n  ".join(lines), hint=hint)


def fill(
    draft: Draft,
    base: Base,
    expected: Mapping[str, Shape] | None,
    excluded: Mapping[str, Shape],
    architecture: str,
    config: Mapping[str, Any],
) -> set[str]:
    """Give a draft with the names of the hub what it lacks, from a base model. Nothing that is there is touched.

    expected: the parameters that the architecture has; None where nothing tells them: then the base model is one of the
              same class, and does.
    excluded: parameters that the checkpoint records as left out.

    Whatever the base model cannot give is a problem. Returns the names whose absence that tells.
    """
    shapes = {name: tensor.shape for name, tensor in base.tensors.items()}
    if expected is None:
        draft.problems += compare(
            draft.tensors,
            shapes,
            f"the base model {base.place}",
            explained=shapes,
            ways_out=dict.fromkeys(("unknown", "missing", "misshapen"), _OTHER_BASE),
        )
        expected = {name: shape for name, shape in shapes.items() if not is_tied_head(name, config)}
    wanted = {**expected, **{name: shape for name, shape in excluded.items() if not is_tied_head(name, config)}}
    absent = {name: shape for name, shape in wanted.items() if name not in draft.tensors}
    offered: dict[str, Value] = {name: base.tensors[name] for name in absent if name in base.tensors}
    draft.problems += compare(
        offered,
        absent,
        architecture,
        ways_out={
            "unknown": _OTHER_BASE,
            "missing": f"`{base.place}` does not have them either: give a base model that does, with --fill-from DIR",
            "misshapen": f"these are the shapes in `{base.place}`. {_OTHER_BASE}",
        },
    )
    given = {name: value for name, value in offered.items() if value.shape == absent[name]}
    lent = [name for name in draft.tensors if base.lent.issuperset(draft.origins[name])]
    _note(draft, base, given, lent)
    whole = {**draft.tensors, **given}
    draft.tensors = {name: whole[name] for name in dict.fromkeys([*wanted, *whole]) if name in whole}
    draft.origins |= {name: (name,) for name in given}
    return set(absent)


_OTHER_BASE = "is it the model that training began with? --fill-from takes that one"


def _note(draft: Draft, base: Base, given: Mapping[str, Value], lent: list[str]) -> None:
    """What came from the base model, and whether it is of other types than what was there."""
    names = (*given, *lent)
    if not names:
        draft.note(f"`{base.place}` had nothing to give: the checkpoint has every parameter", level="warning")
        return
    text = f"{count_in_words(len(names), 'parameter')} that the checkpoint was saved without "
    text += f"{'comes' if len(names) == 1 else 'come'} from `{base.place}`"
    widened = sum([isinstance(value, Tensor) and value.is_cast for value in given.values()])
    draft.note(f"{text}; {widened:,} widened exactly to fp32" if widened else text, names)
    own, others = _float_types(draft.tensors), _float_types(given)
    if own and not others <= own:
        text = f"{items_in_words(sorted(others))} beside the checkpoint's {items_in_words(sorted(own))}"
        draft.note(f"the types are mixed: {text}; --dtype makes them one", tuple(given), level="warning")


def _float_types(values: Mapping[str, Value]) -> set[str]:
    return {value.dtype.name for value in values.values() if value.dtype.is_float}
