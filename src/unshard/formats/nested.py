"""State dicts that are nested, as Megatron's modules build theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unshard.errors import FormatError
from unshard.formats.state_dict import MAX_ENTRIES

_MAX_DEPTH = 16


def flatten(state: Mapping[Any, Any], place: str) -> Iterator[tuple[str, Any]]:
    """The entries of nested dicts in stored order, keys joined by dots; keys that are no text are left out.

    Raises FormatError, which names the file `place`, for more of them than any model has: dicts that share others can
    hold very many.
    """
    waiting: list[tuple[str, Iterator[tuple[Any, Any]]]] = [("", iter(state.items()))]
    seen = 0
    while waiting:
        prefix, entries = waiting[-1]
        for key, value in entries:
            seen += 1
            if seen > MAX_ENTRIES:
                raise FormatError(f"{place}: a state dict of more than {MAX_ENTRIES:,} entries")
            if not isinstance(key, str):
                continue
            if isinstance(value, Mapping) and len(waiting) < _MAX_DEPTH:
                waiting.append((f"{prefix}{key}.", iter(value.items())))
                break
            yield f"{prefix}{key}", value
        else:
            waiting.pop()
