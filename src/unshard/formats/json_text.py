"""Reading JSON from strangers, member by member.

`json.loads` builds everything that a text describes before anybody can look at it: a hundred megabytes of `[[],[],…`
become gigabytes of lists, and a deep nest ends in a RecursionError. This cursor reads only what its caller expects at a
place, refuses duplicate names, and knows where each value lies in the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

_SPACE = re.compile(r"[ \t\n\r]*")
_VALUE_LIMIT = 1 << 16
_MAX_DIGITS = 24
_MAX_MEMBERS = 500_000


class JsonText:
    """A cursor in a JSON text. Every error is a ValueError that says where.

    `position` is the next character to read, `name_position` where the name lies that `members` gave last.
    """

    def __init__(self, text: str, position: int = 0) -> None:
        self.text = text
        self.position = position
        self.name_position = position

    def peek(self) -> str:
        """The next character that is not white space, or an empty string at the end."""
        self.position = _end_of_space(self.text, self.position)
        return self.text[self.position : self.position + 1]

    def accept(self, character: str) -> bool:
        """Steps over the character if it comes next, and says whether it did."""
        found = self.peek() == character
        self.position += found
        return found

    def expect(self, character: str) -> None:
        if not self.accept(character):
            self.fail(f"expected {character!r}")

    def expect_end(self) -> None:
        """Refuses anything but white space up to the end of the text."""
        if self.peek():
            self.fail("unexpected text after the end")

    def fail(self, message: str) -> NoReturn:
        found = repr(self.text[self.position : self.position + 20]) if self.position < len(self.text) else "the end"
        line = self.text.count("\n", 0, self.position) + 1
        column = self.position - self.text.rfind("\n", 0, self.position)
        raise ValueError(f"{message} at line {line} column {column}, found {found}")

    def string(self) -> str:
        """A string that can be written as UTF-8: no lone surrogates."""
        if self.peek() != '"':
            self.fail("expected a string")
        start = self.position
        try:
            value, self.position = _PLAIN.raw_decode(self.text, start)
        except ValueError:
            self.fail("malformed string")
        if not isinstance(value, str) or not is_unicode(value):
            self.position = start
            self.fail("a string that is not valid Unicode")
        return value

    def members(self) -> Iterator[str]:
        """The names of an object's members, one by one; the caller reads each value before it asks for the next."""
        self.expect("{")
        if self.accept("}"):
            return
        seen: set[str] = set()
        while True:
            self.peek()
            self.name_position = self.position
            name = self.string()
            if name in seen:
                self.position = self.name_position
                self.fail("a name that appears twice")
            if len(seen) == _MAX_MEMBERS:
                self.fail(f"more than {_MAX_MEMBERS:,} members")
            seen.add(name)
            self.expect(":")
            yield name
            if not self.accept(","):
                self.expect("}")
                return

    def strings(self) -> dict[str, str]:
        """An object whose values are all strings."""
        return {name: self.string() for name in self.members()}

    def value(self, limit: int = _VALUE_LIMIT) -> Any:
        """Any value of at most `limit` characters; no NaN, no infinity, no number of absurd length."""
        self.peek()
        try:
            value, length = _VALUES.raw_decode(self.text[self.position : self.position + limit])
        except RecursionError:
            self.fail("a value nested too deeply")
        except ValueError:
            self.fail(f"malformed value, or one of more than {limit} characters")
        self.position += length
        return value

    def skip(self) -> None:
        """Steps over a value of any size, in a text that is known to be harmless."""
        self.peek()
        try:
            _, self.position = _PLAIN.raw_decode(self.text, self.position)
        except (ValueError, RecursionError):
            self.fail("malformed value")


def is_unicode(text: str) -> bool:
    """Whether the text can be written as UTF-8."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _end_of_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _parse_int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a name that appears twice")
    return members


_PLAIN = json.JSONDecoder()
_VALUES = json.JSONDecoder(parse_int=_parse_int, parse_constant=_refuse_constant, object_pairs_hook=_unique)
