"""Long lists of names, short enough to read and still complete."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from math import prod

from unshard.words import ranges_in_words

_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")
_NUMBER_OR_RANGE = re.compile(r"(?<![^.])(?:[0-9]+|\[[0-9,-]+\])(?![^.])")


def summarize(names: Iterable[str]) -> dict[str, int]:
    """Names → lines that tell all of them, each with the number of names it stands for.

    Names that differ only in numbers which form a full grid become one line, as `model.layers.[0-27].norm.weight`;
    those that do not are told one by one.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(outline(name), []).append(name)
    lines: dict[str, int] = {}
    for group in groups.values():
        numbers = [[int(number) for number in _NUMBER.findall(name)] for name in group]
        columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
        if len(group) > 1 and prod([len(column) for column in columns]) == len(group):
            lines[outline(group[0]).replace("#", "{}").format(*map(_ranges, columns))] = len(group)
        else:
            lines |= dict.fromkeys(group, 1)
    return lines


def outline(name: str) -> str:
    """A name, or a line of `summarize`, with each number or range replaced by `#`."""
    return _NUMBER_OR_RANGE.sub("#", name)


def nearest(name: str, outlines: Mapping[str, str]) -> str | None:
    """The name that `name` most resembles, numbers aside; None where none does. `outlines` are keyed by outline."""
    close = get_close_matches(outline(name), outlines, n=1, cutoff=0.75)
    return outlines[close[0]] if close else None


def _ranges(numbers: list[int]) -> str:
    """Numbers as `[0-3,5]`; a single one as it is."""
    text = ranges_in_words(numbers, ",")
    return text if len(numbers) == 1 else f"[{text}]"
