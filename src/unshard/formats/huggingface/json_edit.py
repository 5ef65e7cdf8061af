"""Changing one member of a JSON text and no other byte of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unshard.formats.json_text import JsonText


@dataclass(frozen=True, slots=True)
class _Member:
    """Where the name begins, and where the value lies, in characters."""

    name: str
    start: int
    value_start: int
    value_stop: int


def set_member(text: str, path: Sequence[str], value: Any) -> str:
    """The text with the value at a path of names replaced; a member that is not there is added at its object's end.

    Raises ValueError where the objects on the way do not exist, or a name appears twice.
    """
    opening, members = _object_at(text, path[:-1])
    written = json.dumps(value)
    for member in members:
        if member.name == path[-1]:
            return text[: member.value_start] + written + text[member.value_stop :]
    added = f"{json.dumps(path[-1])}: {written}"
    if not members:
        return text[: opening + 1] + added + text[opening + 1 :]
    last = members[-1]
    before = members[-2].value_stop if len(members) > 1 else opening
    gap = text[text.find(",", before) + 1 : last.start] if len(members) > 1 else text[opening + 1 : last.start]
    return f"{text[: last.value_stop]},{gap}{added}{text[last.value_stop :]}"


def remove_member(text: str, path: Sequence[str]) -> str:
    """The text without the member at a path of names; the same text where there is none. Raises as `set_member`."""
    _, members = _object_at(text, path[:-1])
    for number, member in enumerate(members):
        if member.name == path[-1]:
            start, stop = member.start, member.value_stop
            if number + 1 < len(members):
                stop = members[number + 1].start
            elif number:
                start = members[number - 1].value_stop
            return text[:start] + text[stop:]
    return text


def _object_at(text: str, path: Sequence[str]) -> tuple[int, list[_Member]]:
    """Where the object at a path begins, and its members."""
    opening, members = _members(text, 0)
    for name in path:
        places = [member.value_start for member in members if member.name == name]
        if not places:
            raise ValueError(f"no member {name!r}")
        opening, members = _members(text, places[0])
    return opening, members


def _members(text: str, position: int) -> tuple[int, list[_Member]]:
    cursor = JsonText(text, position)
    cursor.peek()
    opening = cursor.position
    members: list[_Member] = []
    for name in cursor.members():
        cursor.peek()
        start = cursor.position
        cursor.skip()
        members.append(_Member(name, cursor.name_position, start, cursor.position))
    return opening, members
