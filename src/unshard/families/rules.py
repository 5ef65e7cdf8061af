"""The rule language: how tensors of one framework become those of another, as inert expressions that can be inverted.

A rule says that one tensor on one side (`whole`) is the same as one or several tensors on the other (`parts`). Reading
it forwards takes the whole apart, reading it backwards puts it together again; no rule runs code, reads a file or
copies a byte. Patterns are names with wildcards: `{rest}` and `{stem}` stand for any text, every other wildcard
(`{layer}`, `{expert}`) for a number. A wildcard that occurs only among the parts is bound by a step that fans out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from unshard.errors import ModelError, UnshardError
from unshard.families.sizes import Sizes
from unshard.families.steps import Key, Parts, Step, Unstack
from unshard.tensors import Tensor, Value
from unshard.words import items_in_lines

MOST_STACKED = 1 << 16
"""More experts than any layer has: a tensor that claims more is refused before it is taken apart."""

_TEXT_WILDCARDS = frozenset({"rest", "stem"})
_WILDCARD = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True, slots=True)
class Rule:
    """`whole` on one side is `parts` on the other.

    steps:       what happens to the tensor on the way from the whole to the parts; none: it is only renamed.
    shape:       of the whole, as expressions over config keys (see `Sizes`); checked as far as the config tells.
    parts_shape: for a rule that keeps the name (it only transposes, say): the shape that the tensor has on the other
                 side, by which a tensor that is already there is recognised.
    own:         it is of a user's own table, and asked before all rules of families, however much they spell out.
    """

    whole: str
    parts: tuple[str, ...]
    steps: tuple[Step, ...] = ()
    shape: tuple[str, ...] = ()
    parts_shape: tuple[str, ...] = ()
    own: bool = False

    def misfit(self, tensor: Value, sizes: Sizes) -> str | None:
        """What is wrong with a tensor that should be this rule's whole, or None."""
        if any(isinstance(step, Unstack) for step in self.steps) and not 0 < (*tensor.shape, 0)[0] <= MOST_STACKED:
            return f"{tensor.name} has shape {list(tensor.shape)}, which is no stack of experts"
        if not self.shape or _fits(tensor.shape, self.shape, sizes):
            return None
        expected = ", ".join([str(_known(part, sizes) or part) for part in self.shape])
        return f"{tensor.name} has shape {list(tensor.shape)}, not [{expected}]"

    def split(self, tensor: Value, sizes: Sizes) -> Parts:
        """The parts of a whole. Raises ValueError for one that does not fit, or that is computed and cannot be cut."""
        pieces: Parts = {(): tensor}
        for step in self.steps:
            pieces = step.forward(pieces, len(self.parts), sizes)
        return pieces

    def join(self, pieces: Mapping[Key, Value], sizes: Sizes) -> Value:
        """The whole of all its parts. Raises ValueError for parts that do not fit together."""
        whole = dict(pieces)
        for step in reversed(self.steps):
            whole = step.backward(whole, len(self.parts), sizes)
        return whole[()]

    def part_name(self, key: Key, bindings: Mapping[str, str]) -> str:
        """The name of the part at `key`, where the whole's wildcards have these values."""
        values, part = dict(bindings), 0
        for fan, number in zip(self.fans, key, strict=True):
            if fan == "part":
                part = number
            else:
                values[fan] = str(number)
        return self.parts[part].format(**values)

    @property
    def fans(self) -> tuple[str, ...]:
        return tuple([step.fan for step in self.steps if step.fan is not None])


def rename(old: str, new: str) -> Rule:
    """A rule that changes the name and nothing else."""
    return Rule(old, (new,))


@dataclass(slots=True)
class Rewritten:
    """What a table of rules made of a set of tensors.

    tensors:   new name → value, in the order of their origins.
    origins:   new name → the names it was made from.
    problems:  wholes that do not fit their rule, names that two tensors would take.
    explained: names that are absent only because of those problems.
    unknown:   names that passed through because no rule knows them.
    own:       new names that the user's own rules gave.
    """

    tensors: dict[str, Value] = field(default_factory=dict)
    origins: dict[str, tuple[str, ...]] = field(default_factory=dict)
    problems: list[UnshardError] = field(default_factory=list)
    explained: set[str] = field(default_factory=set)
    unknown: list[str] = field(default_factory=list)
    own: set[str] = field(default_factory=set)

    def add(self, name: str, value: Value, origins: tuple[str, ...]) -> None:
        if name in self.tensors:
            old, new = ", ".join(self.origins[name]), ", ".join(origins)
            self.problems.append(ModelError(f"{old} and {new} would both become {name}"))
            return
        self.tensors[name] = value if value.name == name else value.rename(name)
        self.origins[name] = origins


def split(tensors: Mapping[str, Value], rules: Sequence[Rule], sizes: Sizes) -> Rewritten:
    """All tensors on the side of the parts. Names that no rule knows pass through."""
    result = Rewritten()
    misfits: list[str] = []
    hints: list[str] = []
    for name, value in tensors.items():
        found = find_rule(name, rules)
        if found is None or _is_done(found[0], value, sizes):
            result.add(name, value, (name,))
            result.unknown += [name] if found is None else []
            continue
        rule, bindings = found
        try:
            parts = _take_apart(rule, value, sizes)
        except (ValueError, ModelError) as misfit:
            misfits.append(misfit.message if isinstance(misfit, ModelError) else str(misfit))
            hints += [misfit.hint] if isinstance(misfit, ModelError) and misfit.hint else []
            result.explained.update(_names_of_parts(rule, value, bindings, sizes))
            continue
        for key, piece in parts.items():
            new = rule.part_name(key, bindings)
            result.add(new, piece, (name,))
            result.own |= {new} if rule.own else set()
    if misfits:
        message = "tensors that do not fit the model's configuration:\n" + items_in_lines(list(dict.fromkeys(misfits)))
        hint = hints[0] if hints else "does this config.json belong to these weights? see --config"
        result.problems.append(ModelError(message, hint=hint))
    return result


def _take_apart(rule: Rule, value: Value, sizes: Sizes) -> Parts:
    """The parts of a whole.

    Raises ValueError for one that does not fit the config, or that cannot be cut so; ModelError where the config lacks
    a size.
    """
    if misfit := rule.misfit(value, sizes):
        raise ValueError(misfit)
    return rule.split(value, sizes)


def join(
    tensors: Mapping[str, Value], rules: Sequence[Rule], sizes: Sizes, wanted: frozenset[str] | None = None
) -> Rewritten:
    """All tensors on the side of the wholes, as far as all parts of a whole are there; the others pass through.

    With `wanted`, only wholes of these names are made.
    """
    groups: dict[str, tuple[Rule, dict[Key, str]]] = {}
    whole_of: dict[str, str] = {}
    for name, value in tensors.items():
        for rule, whole, key in _places(name, rules):
            if (wanted is None or whole in wanted) and (isinstance(value, Tensor) or not rule.steps):
                groups.setdefault(whole, (rule, {}))[1][key] = name
                whole_of[name] = whole
                break
    result = Rewritten()
    done: set[str] = set()
    for name, value in tensors.items():
        group = groups.get(whole_of.get(name, ""))
        if group is None or not _is_complete(*group):
            result.add(name, value, (name,))
        elif whole_of[name] not in done:
            done.add(whole_of[name])
            rule, names = group
            try:
                joined = rule.join({key: tensors[part] for key, part in names.items()}, sizes)
                result.add(whole_of[name], joined, tuple(names.values()))
            except ValueError as error:
                result.problems.append(ModelError(f"the parts of {whole_of[name]} do not fit together: {error}"))
    return result


def find_rule(name: str, rules: Sequence[Rule]) -> tuple[Rule, dict[str, str]] | None:
    """The rule whose `whole` a name is; the user's own, then the one with the most literal text, of several."""
    found = [(rule, match.groupdict()) for rule in rules if (match := pattern_of(rule.whole).fullmatch(name))]
    return max(found, key=lambda pair: (pair[0].own, _literal_length(pair[0].whole))) if found else None


def _places(name: str, rules: Sequence[Rule]) -> Iterator[tuple[Rule, str, Key]]:
    """(rule, name of the whole, key) of all the wholes that a name can be a part of, in the order of `find_rule`."""
    found = []
    for rule in rules:
        for number, part in enumerate(rule.parts):
            if match := pattern_of(part).fullmatch(name):
                bindings = match.groupdict()
                key = tuple([number if fan == "part" else int(bindings[fan]) for fan in rule.fans])
                found.append(((not rule.own, -_literal_length(part)), rule, rule.whole.format(**bindings), key))
    for _, rule, whole, key in sorted(found, key=lambda place: place[0]):
        yield rule, whole, key


def _is_complete(rule: Rule, names: Mapping[Key, str]) -> bool:
    """Whether the keys are a full grid, with as many parts as the rule has."""
    sizes = [len(rule.parts) if fan == "part" else 1 + max(key[i] for key in names) for i, fan in enumerate(rule.fans)]
    total = 1
    for size in sizes:
        total *= size
    return len(names) == total


def _is_done(rule: Rule, value: Value, sizes: Sizes) -> bool:
    """Whether a rule that keeps the name has nothing left to do.

    A tensor that could be on either side (it is square) is on the whole's side if the config is of transformers 5.
    """
    if not (rule.parts_shape and _fits(value.shape, rule.parts_shape, sizes)):
        return False
    return not _fits(value.shape, rule.shape, sizes) or (sizes.transformers_version or (5, 0)) < (5, 0)


def _names_of_parts(rule: Rule, value: Value, bindings: Mapping[str, str], sizes: Sizes) -> Iterator[str]:
    """The names that a misshapen whole would have given, by the config (by its own shape, where that is silent)."""
    fans = rule.fans
    count = (_known(rule.shape[0], sizes) or value.shape[0]) if value.shape and rule.shape else 0
    keys: list[Key] = [()]
    for fan in fans:
        keys = [
            (*key, i) for key in keys for i in range(len(rule.parts) if fan == "part" else min(count, MOST_STACKED))
        ]
    for key in keys:
        yield rule.part_name(key, bindings)


def _fits(shape: Sequence[int], expected: Sequence[str], sizes: Sizes) -> bool:
    """Whether a shape agrees with all that the config says of it; what it does not say need only be divisible."""
    if len(shape) != len(expected):
        return False
    for size, expression in zip(shape, expected, strict=True):
        known = _known(expression, sizes)
        head = expression.split("*")[0]
        if known is not None and size != known:
            return False
        if known is None and head.isdecimal() and size % int(head):
            return False
    return True


def _known(expression: str, sizes: Sizes) -> int | None:
    return None if expression == "?" else sizes.known(expression)


@cache
def pattern_of(pattern: str) -> re.Pattern[str]:
    """The names that a pattern stands for, its wildcards as groups."""
    text = ""
    for number, piece in enumerate(_WILDCARD.split(pattern)):
        if number % 2 == 0:
            text += re.escape(piece)
        else:
            text += f"(?P<{piece}>.+)" if piece in _TEXT_WILDCARDS else f"(?P<{piece}>[0-9]{{1,9}})"
    return re.compile(text)


@cache
def _literal_length(pattern: str) -> int:
    return len(_WILDCARD.sub("", pattern))
