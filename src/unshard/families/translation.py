"""What becomes of a checkpoint in another framework's dialect, and what is said of it in all of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unshard.checkpoint import Note
from unshard.errors import ModelError, UnshardError
from unshard.families.architecture import count_labels
from unshard.families.naming.lists import nearest, summarize
from unshard.families.rules import Rewritten, Rule
from unshard.families.sizes import Sizes
from unshard.families.template import Family
from unshard.tensors import Computed, Tensor
from unshard.words import count_in_words, items_in_lines

_WILDCARD = re.compile(r"\{[a-z_]+\}")


@dataclass(frozen=True, slots=True)
class Translation:
    """A checkpoint's tensors under the names of the Hugging Face file, adapters as PEFT names them.

    computed: the values that are no plain bytes of the checkpoint: shifted norms.
    own:      names that the user's own rules gave: they are written, whatever the architecture has.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    computed: Mapping[str, Computed] = field(default_factory=dict)
    own: frozenset[str] = frozenset()
    notes: tuple[Note, ...] = ()
    problems: tuple[UnshardError, ...] = ()


def finish(result: Rewritten, notes: Sequence[Note], problems: Sequence[UnshardError]) -> Translation:
    """What rules made of a checkpoint, as a translation."""
    return Translation(
        {name: value for name, value in result.tensors.items() if isinstance(value, Tensor)},
        {name: value for name, value in result.tensors.items() if isinstance(value, Computed)},
        frozenset(result.own),
        tuple(notes),
        tuple(problems),
    )


def sizes_of(config: Mapping[str, Any], family: Family | None, facts: Mapping[str, Any]) -> Sizes:
    """The sizes of a model, by its config, its family's defaults and what training recorded."""
    defaults = family.all_defaults() if family else None
    return Sizes(config, defaults, {"num_labels": count_labels(config)}, facts)


def map_hint(whose: str) -> str:
    """What to do where rules are missing. whose: names, "Megatron's"."""
    return f"add the rules that are missing with --map FILE, or write {whose} own names with --names stored"


def no_rules(config: Mapping[str, Any], whose: str) -> ModelError:
    """There is no table for this kind of model at all."""
    message = f"no rules lead from {whose} names to those of a {config.get('model_type')!r} model"
    return ModelError(message, hint=map_hint(whose))


def unknown_names(
    names: Sequence[str], rules: Sequence[Rule], config: Mapping[str, Any], family: Family | None, whose: str
) -> ModelError:
    """All names that no rule knows, each with the known one that it resembles."""
    known = {_WILDCARD.sub("#", rule.whole): rule.whole for rule in rules}
    lines = list(_with_guesses(names, known))
    what = f"{config.get('model_type')!r} models" if family else "the rules that were given"
    tensors = count_in_words(len(names), "tensor")
    hint = f"does this config.json belong to these weights (--config DIR)? If it does, {map_hint(whose)}"
    return ModelError(f"{tensors} unknown to the rules for {what}:\n{items_in_lines(lines)}", hint=hint)


def _with_guesses(names: Sequence[str], known: Mapping[str, str]) -> Iterator[str]:
    for line, count in summarize(names).items():
        text = line if count == 1 else f"{line} ({count_in_words(count, 'tensor')})"
        guess = nearest(line, known)
        yield f"{text}, close to {guess}" if guess else text
