"""The opcodes of pickle protocols 0 to 5 (CPython, `Lib/pickletools.py`), one function each.

A function is given the machine and the position after its opcode, and returns the position of the next one. Opcodes
that reach out of the file (extension registry, out-of-band buffers) are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, TypeAlias

from unshard.errors import FormatError
from unshard.formats.torch_file.machine import Machine, PickleEndsError

Operation: TypeAlias = Callable[[Machine, int], int]

UINT16 = Struct("<H").unpack_from
INT32 = Struct("<i").unpack_from
UINT32 = Struct("<I").unpack_from
UINT64 = Struct("<Q").unpack_from
DOUBLE = Struct(">d").unpack_from
HIGHEST_PROTOCOL = 5


def _unknown(machine: Machine, position: int) -> int:
    raise FormatError(f"no pickle: unknown opcode 0x{machine.data[position - 1]:02x}")


OPERATIONS: list[Operation] = [_unknown] * 256


def _operation(*codes: bytes) -> Callable[[Operation], Operation]:
    def register(function: Operation) -> Operation:
        for code in codes:
            OPERATIONS[code[0]] = function
        return function

    return register


# Frames and marks ----------------------------------------------------------------------------------------------------


@_operation(b"\x80")
def proto(machine: Machine, position: int) -> int:
    if machine.data[position] > HIGHEST_PROTOCOL:
        raise FormatError(f"pickle protocol {machine.data[position]} is not known")
    return position + 1


@_operation(b"\x95")
def frame(machine: Machine, position: int) -> int:
    (size,) = UINT64(machine.data, position)
    if position + 8 + size > len(machine.data):
        raise PickleEndsError("the pickle ends early, inside a frame")
    return position + 8


@_operation(b"(")
def mark(machine: Machine, position: int) -> int:
    machine.marks.append(len(machine.stack))
    return position


@_operation(b"0")
def pop(machine: Machine, position: int) -> int:
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
    else:
        machine.stack.pop()
    return position


@_operation(b"1")
def pop_mark(machine: Machine, position: int) -> int:
    machine.pop_to_mark()
    return position


@_operation(b"2")
def dup(machine: Machine, position: int) -> int:
    machine.stack.append(machine.stack[-1])
    return position


# The memo ------------------------------------------------------------------------------------------------------------


@_operation(b"q")
def binput(machine: Machine, position: int) -> int:
    machine.memo[machine.data[position]] = machine.stack[-1]
    return position + 1


@_operation(b"r")
def long_binput(machine: Machine, position: int) -> int:
    machine.remember(UINT32(machine.data, position)[0])
    return position + 4


@_operation(b"p")
def put(machine: Machine, position: int) -> int:
    line, position = machine.take_line(position)
    machine.remember(_parse_integer(machine, line))
    return position


@_operation(b"\x94")
def memoize(machine: Machine, position: int) -> int:
    machine.remember(len(machine.memo))
    return position


@_operation(b"h")
def binget(machine: Machine, position: int) -> int:
    machine.stack.append(machine.memo[machine.data[position]])
    return position + 1


@_operation(b"j")
def long_binget(machine: Machine, position: int) -> int:
    machine.stack.append(machine.memo[UINT32(machine.data, position)[0]])
    return position + 4


@_operation(b"g")
def get(machine: Machine, position: int) -> int:
    line, position = machine.take_line(position)
    machine.stack.append(machine.memo[_parse_integer(machine, line)])
    return position


# Constants and numbers -----------------------------------------------------------------------------------------------


@_operation(b"N")
def none(machine: Machine, position: int) -> int:
    machine.stack.append(None)
    return position


@_operation(b"\x88")
def newtrue(machine: Machine, position: int) -> int:
    machine.stack.append(True)
    return position


@_operation(b"\x89")
def newfalse(machine: Machine, position: int) -> int:
    machine.stack.append(False)
    return position


@_operation(b"K")
def binint1(machine: Machine, position: int) -> int:
    machine.stack.append(machine.data[position])
    return position + 1


@_operation(b"M")
def binint2(machine: Machine, position: int) -> int:
    machine.stack.append(UINT16(machine.data, position)[0])
    return position + 2


@_operation(b"J")
def binint(machine: Machine, position: int) -> int:
    machine.stack.append(INT32(machine.data, position)[0])
    return position + 4


@_operation(b"\x8a")
def long1(machine: Machine, position: int) -> int:
    return _push_long(machine, position + 1, machine.data[position])


@_operation(b"\x8b")
def long4(machine: Machine, position: int) -> int:
    return _push_long(machine, position + 4, INT32(machine.data, position)[0])


def _push_long(machine: Machine, position: int, size: int) -> int:
    if not 0 <= size <= machine.limits.integer_bytes:
        raise FormatError(f"the pickle has an integer of {size} bytes")
    machine.stack.append(int.from_bytes(machine.take(position, size), "little", signed=True))
    return position + size


@_operation(b"I")
def int_(machine: Machine, position: int) -> int:
    line, position = machine.take_line(position)
    machine.stack.append({b"00": False, b"01": True}[line] if line in (b"00", b"01") else _parse_integer(machine, line))
    return position


@_operation(b"L")
def long_(machine: Machine, position: int) -> int:
    line, position = machine.take_line(position)
    machine.stack.append(_parse_integer(machine, line.removesuffix(b"L")))
    return position


def _parse_integer(machine: Machine, digits: bytes) -> int:
    if len(digits) > machine.limits.number_digits:
        raise FormatError(f"the pickle has an integer of {len(digits)} digits")
    return int(digits)


@_operation(b"F")
def float_(machine: Machine, position: int) -> int:
    line, position = machine.take_line(position)
    if len(line) > machine.limits.number_digits:
        raise FormatError(f"the pickle has a number of {len(line)} digits")
    machine.stack.append(float(line))
    return position


@_operation(b"G")
def binfloat(machine: Machine, position: int) -> int:
    machine.stack.append(DOUBLE(machine.data, position)[0])
    return position + 8


# Text and bytes ------------------------------------------------------------------------------------------------------


@_operation(b"X")
def binunicode(machine: Machine, position: int) -> int:
    return _push_text(machine, position + 4, UINT32(machine.data, position)[0])


@_operation(b"\x8c")
def short_binunicode(machine: Machine, position: int) -> int:
    return _push_text(machine, position + 1, machine.data[position])


@_operation(b"\x8d")
def binunicode8(machine: Machine, position: int) -> int:
    return _push_text(machine, position + 8, UINT64(machine.data, position)[0])


def _push_text(machine: Machine, position: int, size: int) -> int:
    # Lone surrogates, which no terminal and no JSON takes, are shown as escapes.
    machine.stack.append(machine.take(position, size).decode("utf-8", "backslashreplace"))
    return position + size


@_operation(b"V")
def unicode_(machine: Machine, position: int) -> int:
    line, position = machine.take_line(position)
    text = line.decode("raw_unicode_escape")
    machine.stack.append(text.encode("utf-8", "backslashreplace").decode("utf-8"))
    return position


@_operation(b"U")
def short_binstring(machine: Machine, position: int) -> int:
    return _push_string(machine, position + 1, machine.data[position])


@_operation(b"T")
def binstring(machine: Machine, position: int) -> int:
    return _push_string(machine, position + 4, UINT32(machine.data, position)[0])


@_operation(b"S")
def string(machine: Machine, position: int) -> int:
    line, position = machine.take_line(position)
    if len(line) < 2 or line[:1] not in (b"'", b'"') or line[:1] != line[-1:]:
        raise FormatError("the pickle has a string without quotes")
    machine.stack.append(_text_if_possible(line[1:-1].decode("unicode_escape").encode("latin-1")))
    return position


def _push_string(machine: Machine, position: int, size: int) -> int:
    machine.stack.append(_text_if_possible(machine.take(position, size)))
    return position + size


def _text_if_possible(data: bytes) -> str | bytes:
    """Python 2 had one type for text and bytes."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data


@_operation(b"C")
def short_binbytes(machine: Machine, position: int) -> int:
    return _push_bytes(machine, position + 1, machine.data[position])


@_operation(b"B")
def binbytes(machine: Machine, position: int) -> int:
    return _push_bytes(machine, position + 4, UINT32(machine.data, position)[0])


@_operation(b"\x8e", b"\x96")
def binbytes8(machine: Machine, position: int) -> int:
    return _push_bytes(machine, position + 8, UINT64(machine.data, position)[0])


def _push_bytes(machine: Machine, position: int, size: int) -> int:
    machine.stack.append(machine.take(position, size))
    return position + size


# Containers ----------------------------------------------------------------------------------------------------------


@_operation(b")")
def empty_tuple(machine: Machine, position: int) -> int:
    machine.stack.append(())
    return position


@_operation(b"]")
def empty_list(machine: Machine, position: int) -> int:
    return _push(machine, position, [])


@_operation(b"}")
def empty_dict(machine: Machine, position: int) -> int:
    return _push(machine, position, {})


@_operation(b"\x85")
def tuple1(machine: Machine, position: int) -> int:
    return _push_tuple(machine, position, 1)


@_operation(b"\x86")
def tuple2(machine: Machine, position: int) -> int:
    return _push_tuple(machine, position, 2)


@_operation(b"\x87")
def tuple3(machine: Machine, position: int) -> int:
    return _push_tuple(machine, position, 3)


def _push_tuple(machine: Machine, position: int, size: int) -> int:
    stack = machine.stack
    if len(stack) < size:
        raise FormatError("the pickle's stack is too short for a tuple")
    items = tuple(stack[-size:])
    del stack[-size:]
    return _push(machine, position, items)


@_operation(b"t")
def tuple_(machine: Machine, position: int) -> int:
    return _push(machine, position, tuple(machine.pop_to_mark()))


@_operation(b"l")
def list_(machine: Machine, position: int) -> int:
    return _push(machine, position, machine.pop_to_mark())


@_operation(b"d")
def dict_(machine: Machine, position: int) -> int:
    target: dict[Any, Any] = {}
    machine.set_items(target, machine.pop_to_mark())
    return _push(machine, position, target)


@_operation(b"\x8f")
def empty_set(machine: Machine, position: int) -> int:
    return _call(machine, position, machine.builder.find("builtins", "set"), ())


@_operation(b"\x91")
def frozenset_(machine: Machine, position: int) -> int:
    items = machine.pop_to_mark()
    position = _call(machine, position, machine.builder.find("builtins", "frozenset"), ())
    machine.append_to(machine.stack[-1], items)
    return position


def _push(machine: Machine, position: int, container: Any) -> int:
    machine.budget.spend(1)
    machine.stack.append(container)
    return position


@_operation(b"a")
def append(machine: Machine, position: int) -> int:
    item = machine.stack.pop()
    machine.append_to(machine.stack[-1], (item,))
    return position


@_operation(b"e", b"\x90")
def appends(machine: Machine, position: int) -> int:
    items = machine.pop_to_mark()
    machine.append_to(machine.stack[-1], items)
    return position


@_operation(b"s")
def setitem(machine: Machine, position: int) -> int:
    value = machine.stack.pop()
    key = machine.stack.pop()
    machine.set_items(machine.stack[-1], (key, value))
    return position


@_operation(b"u")
def setitems(machine: Machine, position: int) -> int:
    flat = machine.pop_to_mark()
    machine.set_items(machine.stack[-1], flat)
    return position


# Classes and calls, of which none is looked up or made ---------------------------------------------------------------


@_operation(b"c")
def global_(machine: Machine, position: int) -> int:
    module, position = machine.take_line(position)
    name, position = machine.take_line(position)
    machine.stack.append(machine.builder.find(module.decode("utf-8"), name.decode("utf-8")))
    return position


@_operation(b"\x93")
def stack_global(machine: Machine, position: int) -> int:
    name = machine.stack.pop()
    module = machine.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise FormatError("the pickle names a class by other than text")
    machine.stack.append(machine.builder.find(module, name))
    return position


@_operation(b"R", b"\x81")
def reduce(machine: Machine, position: int) -> int:
    """REDUCE and NEWOBJ: a function or a class, and what it is called with."""
    args = machine.stack.pop()
    machine.stack[-1] = machine.builder.call(machine.stack[-1], args)
    return position


@_operation(b"\x92")
def newobj_ex(machine: Machine, position: int) -> int:
    kwargs = machine.stack.pop()
    args = machine.stack.pop()
    if not isinstance(kwargs, dict):
        raise FormatError("the pickle makes a call whose keyword arguments are no dict")
    machine.stack[-1] = machine.builder.call(machine.stack[-1], args, kwargs)
    return position


@_operation(b"i")
def inst(machine: Machine, position: int) -> int:
    module, position = machine.take_line(position)
    name, position = machine.take_line(position)
    function = machine.builder.find(module.decode("utf-8"), name.decode("utf-8"))
    return _call(machine, position, function, tuple(machine.pop_to_mark()))


@_operation(b"o")
def obj(machine: Machine, position: int) -> int:
    function, *args = machine.pop_to_mark()
    return _call(machine, position, function, tuple(args))


def _call(machine: Machine, position: int, function: Any, args: tuple[Any, ...]) -> int:
    machine.stack.append(machine.builder.call(function, args))
    return position


@_operation(b"b")
def build(machine: Machine, position: int) -> int:
    state = machine.stack.pop()
    machine.stack[-1] = machine.builder.build(machine.stack[-1], state)
    return position


@_operation(b"Q")
def binpersid(machine: Machine, position: int) -> int:
    machine.stack[-1] = machine.builder.load(machine.stack[-1])
    return position


@_operation(b"P")
def persid(machine: Machine, position: int) -> int:
    line, position = machine.take_line(position)
    machine.stack.append(machine.builder.load(line))
    return position


@_operation(b"\x82", b"\x83", b"\x84")
def ext(machine: Machine, position: int) -> int:
    raise FormatError("the pickle refers to Python's extension registry, which is not part of the file")


@_operation(b"\x97", b"\x98")
def buffer(machine: Machine, position: int) -> int:
    raise FormatError("the pickle refers to buffers that were not saved with it")
