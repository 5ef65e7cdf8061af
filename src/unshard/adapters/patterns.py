"""PEFT's ways to say which modules something holds for, read and written.

Reading follows huggingface/peft: `get_pattern_key` (`src/peft/utils/other.py`) for `rank_pattern` and `alpha_pattern`,
`check_target_module_exists` (`src/peft/tuners/tuners_utils.py`) for `target_modules`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import TypeVar

V = TypeVar("V", int, float)

_UNBOUNDED = re.compile(r"(?<!\\)[*+{]")
_REPEATED_GROUP = re.compile(r"(?<!\\)\)[*+{]")
_MAX_UNBOUNDED = 3


def value_for(patterns: Mapping[str, V], path: str, default: V) -> V:
    """The value of the first pattern that matches the path or an end of it, from a dot on; else the default."""
    for pattern, value in patterns.items():
        if _matches(pattern, path):
            return value
    return default


def pattern_fault(pattern: str) -> str | None:
    """What is wrong with a pattern: it is no regular expression, or trying it could take for ever."""
    if not _is_expression(pattern):
        return None
    if _REPEATED_GROUP.search(pattern) or len(_UNBOUNDED.findall(pattern)) > _MAX_UNBOUNDED:
        return f"the pattern {pattern!r} repeats too much to be tried safely"
    try:
        re.compile(rf"(.*\.)?({pattern})$")
    except re.error as error:
        return f"the pattern {pattern!r} is no regular expression: {error}"
    return None


def _matches(pattern: str, path: str) -> bool:
    if _is_expression(pattern):
        return re.match(rf"(.*\.)?({pattern})$", path) is not None
    return is_end(pattern, path)


def _is_expression(pattern: str) -> bool:
    """Whether the pattern is more than a module's name, whose dots PEFT takes for any character."""
    return re.fullmatch(r"[\w.-]*", pattern) is None


def is_end(end: str, path: str) -> bool:
    """Whether `end` is the path, or its last components."""
    return path == end or path.endswith("." + end)


def last_component(path: str) -> str:
    return path.rpartition(".")[2]


def ends_of(path: str) -> Iterator[str]:
    """The path and its last components, longest first."""
    components = path.split(".")
    for start in range(len(components)):
        yield ".".join(components[start:])


def patterns_for(values: Mapping[str, V], default: V) -> dict[str, V]:
    """The shortest patterns by which `value_for` gives each path its value, longest first: the first match counts."""
    groups: dict[str, set[V]] = defaultdict(set)
    ambiguous: set[str] = set()
    for path, value in values.items():
        groups[last_component(path)].add(value)
        ambiguous |= {end for end in ends_of(path) if values.get(end, value) != value}
    patterns: dict[str, V] = {}
    for path, value in values.items():
        if value == default:
            continue
        end = last_component(path)
        alone = len(groups[end]) == 1
        patterns[end if alone else "^" + re.escape(path) if path in ambiguous else path] = value
    return {pattern: patterns[pattern] for pattern in sorted(patterns, key=lambda key: (-len(key), key))}


def shortest_targets(targets: Collection[str], modules: Collection[str]) -> list[str]:
    """Names that target exactly `targets` among `modules`: last components where these say enough, else whole paths.

    With no modules known beside the targets, whole paths are the only exact answer.
    """
    spoken_for = set(targets)
    ends_elsewhere = {last_component(module) for module in modules if module not in spoken_for}
    return sorted(
        {
            target if not modules or last_component(target) in ends_elsewhere else last_component(target)
            for target in targets
        }
    )
