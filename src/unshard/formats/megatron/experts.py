"""Experts: one tensor per layer and matrix, stacked over global expert numbers, whatever implementation it was."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

from unshard.errors import IncompleteError, UnshardError
from unshard.tensors import Tensor, stack
from unshard.words import items_in_words, names_in_words

Gaps: TypeAlias = tuple[tuple[int, int], ...]
"""Runs of numbers, each by its first and its last."""

_LOCAL = re.compile(r"(.+\.experts)\.local_experts\.(\d{1,6})\.(.+)")
_HINT = "bring all files of the checkpoint together: each expert-parallel rank holds some of the experts"


def stack_experts(tensors: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], Sequence[UnshardError]]:
    """All tensors, those of single experts stacked, and what is wrong with the experts.

    `….experts.local_experts.{global expert}.linear_fc1.weight` [2F, h] become `….experts.linear_fc1.weight` [E, 2F, h],
    where the first of them stood. How many experts there are is told by the router beside them (its weight is [E, h]),
    else by the highest number. Where experts are missing, or differ in shape or dtype, the stack is left out.
    """
    groups: dict[str, dict[int, Tensor]] = {}
    places: dict[str, str] = {}
    for name, tensor in tensors.items():
        found = _LOCAL.fullmatch(name)
        target = f"{found[1]}.{found[3]}" if found else name
        places[name] = target
        if found:
            groups.setdefault(target, {})[int(found[2])] = tensor
    if not groups:
        return tensors, ()
    missing = {target: _missing(target, experts, tensors) for target, experts in groups.items()}
    problems: list[UnshardError] = [*_report_missing(missing), *_report_twice(groups.keys() & tensors.keys())]
    stacked: dict[str, Tensor] = {}
    for target in dict.fromkeys(places.values()):
        if target not in groups:
            stacked[target] = tensors[target]
        elif not missing[target]:
            try:
                experts = [tensor for _, tensor in sorted(groups[target].items())]
                stacked[target] = stack(experts, name=target)
            except ValueError as error:
                problems.append(IncompleteError(f"the experts of `{target}` differ in shape or dtype: {error}"))
    return stacked, tuple(problems)


def _missing(target: str, experts: Collection[int], tensors: Mapping[str, Tensor]) -> Gaps:
    """The runs of experts that should be there and are not."""
    router = tensors.get(f"{target.rpartition('.experts.')[0]}.router.weight")
    count = router.shape[0] if router is not None and router.shape else 0
    present = sorted(experts)
    bounds = zip([-1, *present], [*present, max(count, present[-1] + 1)], strict=True)
    return tuple([(before + 1, after - 1) for before, after in bounds if after - before > 1])


def _report_missing(missing: Mapping[str, Gaps]) -> Iterable[UnshardError]:
    """One problem for all tensors that lack the same experts."""
    lacking: dict[Gaps, list[str]] = defaultdict(list)
    for target, gaps in missing.items():
        if gaps:
            lacking[gaps].append(target)
    for gaps, targets in lacking.items():
        runs = items_in_words([f"{low}" if low == high else f"{low}-{high}" for low, high in gaps])
        one = len(gaps) == 1 and gaps[0][0] == gaps[0][1]
        yield IncompleteError(
            f"expert{'' if one else 's'} {runs} missing: {names_in_words(targets)} cannot be made whole", hint=_HINT
        )


def _report_twice(targets: Iterable[str]) -> Iterable[UnshardError]:
    if names := sorted(targets):
        yield IncompleteError(f"stored twice, for all experts at once and for each of them: {names_in_words(names)}")
