r"""Regular expressions that a checkpoint brings along, to be matched against names of parameters as `re.match` does.

A checkpoint is data that nobody vouches for, and a regular expression can be made to run for ever. So only the kind
that frameworks write is compiled: literal text, `.`, `\d`, sets of characters, and few of the quantifiers `*` and `+`.
AutoTP writes one pattern per parameter, which is that parameter's name: these are looked up, not tried one by one.
Sources: DeepSpeed `module_inject/layers.py` (`^re.escape(name)$`), Megatron-DeepSpeed `megatron/model/gpt_model.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Generic, TypeVar

from unshard.errors import FormatError
from unshard.words import items_in_lines, one_line

Found = TypeVar("Found")

_WHOLE_NAME = re.compile(r"\^((?:[\w/]|\\[^\w])*)\$")
_HARMLESS = re.compile(r"\^?(?:(?:[\w\-/]|\\[^\w]|\\d|\.|\[[\w\-]+\])[*+]?)*\$?")
_QUANTIFIER = re.compile(r"(?<!\\)[*+]")
_MOST_QUANTIFIERS = 3
_LONGEST = 500
_MOST_PATTERNS = 1000
LONGEST_NAME = 400
"""Of names that may be matched: what a few quantifiers take grows with a power of it."""


class Patterns(Generic[Found]):
    """What is said of parameters, by patterns of their names.

    Raises FormatError for patterns of no kind that a framework writes.
    """

    def __init__(self, said: Iterable[tuple[object, Found]]) -> None:
        self._names: dict[str, Found] = {}
        self._patterns: list[tuple[re.Pattern[str], Found]] = []
        refused = []
        for pattern, found in said:
            if not isinstance(pattern, str) or not _is_harmless(pattern):
                refused.append(one_line(str(pattern)[:_LONGEST]))
            elif whole := _WHOLE_NAME.fullmatch(pattern):
                self._names[re.sub(r"\\(.)", r"\1", whole[1])] = found
            else:
                self._patterns.append((re.compile(pattern), found))
        if len(self._patterns) > _MOST_PATTERNS:
            raise FormatError(f"universal_checkpoint_info has over {_MOST_PATTERNS:,} patterns that are not names")
        if refused:
            raise FormatError(
                "universal_checkpoint_info has patterns of names that are of no known kind:\n" + items_in_lines(refused)
            )

    def find(self, name: str) -> Found | None:
        """What is said of a name; None where nothing is."""
        if name in self._names:
            return self._names[name]
        return next((found for pattern, found in self._patterns if pattern.match(name)), None)


def _is_harmless(pattern: str) -> bool:
    return (
        len(pattern) <= _LONGEST
        and _HARMLESS.fullmatch(pattern) is not None
        and len(_QUANTIFIER.findall(pattern)) <= _MOST_QUANTIFIERS
    )
