"""The machine on which pickles run: it can build data and do nothing else.

Pickle is a small stack language (the opcodes are those of CPython, `Lib/pickletools.py`). Where the real one imports
and calls, this one asks a `Builder` for an inert record. Nothing is looked up outside the file, no recursion follows
the file's nesting, and all growth is counted against `Limits`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from unshard.errors import FormatError
from unshard.formats.torch_file.limits import Limits
from unshard.formats.torch_file.records import Opaque

LARGEST_INTEGER_KEY = 1 << 64
MEMO_COST = 2


class PickleEndsError(FormatError):
    """The pickle is not complete in the bytes that were given."""


class Budget:
    """What is left of `Limits.objects`."""

    __slots__ = ("left",)

    def __init__(self, limits: Limits) -> None:
        self.left = limits.objects

    def spend(self, units: int) -> None:
        self.left -= units
        if self.left < 0:
            raise FormatError("the pickle builds more objects than any checkpoint needs")


class Builder(Protocol):
    """Makes values where a pickle would import, call or set state."""

    def find(self, module: str, name: str) -> Any:
        """What stands for `module.name`."""
        ...

    def call(self, function: Any, args: Any, kwargs: Mapping[str, Any] | None = None) -> Any:
        """What stands for the result of a call."""
        ...

    def build(self, target: Any, state: Any) -> Any:
        """`target` with its state set."""
        ...

    def load(self, reference: Any) -> Any:
        """What a persistent id refers to."""
        ...


class Machine:
    """The state of one run over the pickle `data`.

    `stack` holds the values, `marks` the stack heights at which MARK stood. `memo` is what PUT remembered: picklers
    count its places up from 0, so that a list holds them; what a pickle puts at other places is in `scattered`.
    """

    __slots__ = ("_tuple_keys", "budget", "builder", "data", "limits", "marks", "memo", "scattered", "stack")

    def __init__(self, data: bytes, builder: Builder, budget: Budget, limits: Limits) -> None:
        self.data = data
        self.builder = builder
        self.budget = budget
        self.limits = limits
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.scattered: dict[int, Any] = {}
        self._tuple_keys = 0

    def push(self, value: Any) -> None:
        """Put a value that takes memory of its own on the stack."""
        self.budget.spend(1)
        self.stack.append(value)

    def take(self, position: int, count: int) -> bytes:
        """`count` bytes of the pickle from `position` on."""
        piece = self.data[position : position + count]
        if len(piece) != count:
            raise PickleEndsError(f"the pickle ends early: {count} bytes are announced, {len(piece)} are left")
        return piece

    def take_line(self, position: int) -> tuple[bytes, int]:
        """The bytes up to the next newline, and the position after it."""
        end = self.data.find(b"\n", position)
        if end < 0:
            raise PickleEndsError("the pickle ends early, in a line of text")
        return self.data[position:end], end + 1

    def take_integer(self, position: int) -> tuple[int, int]:
        """The number written in digits up to the next newline, and the position after it."""
        line, position = self.take_line(position)
        return self.parse_integer(line), position

    def parse_integer(self, digits: bytes) -> int:
        if len(digits) > self.limits.number_digits:
            raise FormatError(f"the pickle has an integer of {len(digits)} digits")
        return int(digits)

    def pop_to_mark(self) -> list[Any]:
        """All that was pushed since the last MARK."""
        mark = self.marks.pop()
        if mark > len(self.stack):
            raise FormatError("the pickle is damaged: its stack is shorter than its last mark")
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def remember(self, index: int) -> None:
        """Put the top of the stack into the memo."""
        self.budget.spend(MEMO_COST)
        count = len(self.memo)
        if index == count:
            self.memo.append(self.stack[-1])
            if self.scattered:
                self.scattered.pop(index, None)
        elif 0 <= index < count:
            self.memo[index] = self.stack[-1]
        else:
            self.scattered[index] = self.stack[-1]

    def recall(self, index: int) -> None:
        """Push what the memo has at this place. LookupError where it has nothing."""
        self.stack.append(self.memo[index] if 0 <= index < len(self.memo) else self.scattered[index])

    def append_to(self, target: Any, items: Sequence[Any]) -> None:
        """APPEND and APPENDS: only lists and records can be appended to."""
        self.budget.spend(1 + len(items) // 8)
        if type(target) is list:
            target.extend(items)
        elif isinstance(target, Opaque):
            if not isinstance(target.items, list):
                target.items = []
            target.items.extend(items)
        else:
            raise FormatError(f"the pickle appends to an object of kind {type(target).__name__}")

    def set_items(self, target: Any, flat: Sequence[Any]) -> None:
        """SETITEM and SETITEMS, of keys and values in turn: only dicts and records have items."""
        if len(flat) % 2:
            raise FormatError("the pickle sets a key without a value")
        self.budget.spend(3 + len(flat) // 2)
        keys, values = flat[::2], flat[1::2]
        if isinstance(target, Opaque):
            if not isinstance(target.pairs, list):
                target.pairs = []
            target.pairs.extend(zip(keys, values, strict=True))
            return
        if type(target) is not dict:
            raise FormatError(f"the pickle sets items of an object of kind {type(target).__name__}")
        longest = self.limits.key_length
        for key in keys:
            if type(key) is not str or len(key) > longest:
                self._check_key(key)
        target.update(zip(keys, values, strict=True))

    def _check_key(self, key: Any) -> None:
        """Refuse keys that are costly or unsafe to hash or to compare."""
        if isinstance(key, tuple):
            self._tuple_keys += 1
            if self._tuple_keys > self.limits.tuple_keys:
                raise FormatError("the pickle has more tuples as dict keys than we accept")
        parts = [key]
        for count, part in enumerate(parts):
            if count >= self.limits.key_parts:
                raise FormatError("the pickle has a dict key with too many parts")
            if isinstance(part, tuple):
                parts.extend(part[: self.limits.key_parts])
            elif not self._is_cheap(part):
                raise FormatError(f"the pickle has a dict key that we do not accept, of kind {type(part).__name__}")

    def _is_cheap(self, part: Any) -> bool:
        if isinstance(part, (str, bytes)):
            return len(part) <= self.limits.key_length
        if isinstance(part, int):
            return -LARGEST_INTEGER_KEY < part < LARGEST_INTEGER_KEY
        return not isinstance(part, (list, dict))


Operation: TypeAlias = Callable[[Machine, int], int]
"""An opcode: from the machine and the position after the opcode to the position of the next."""
