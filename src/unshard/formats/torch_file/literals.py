"""The opcodes of pickle that push constants, numbers, text and bytes (CPython, `Lib/pickletools.py`).

A function is given the machine and the position after its opcode, and returns the position of the next one.
"""

from __future__ import annotations

from struct import Struct

from unshard.errors import FormatError
from unshard.formats.torch_file.machine import Machine, Operation

UINT16 = Struct("<H").unpack_from
INT32 = Struct("<i").unpack_from
UINT32 = Struct("<I").unpack_from
UINT64 = Struct("<Q").unpack_from
DOUBLE = Struct(">d").unpack_from
BOOLS = {b"00": False, b"01": True}


def none(machine: Machine, position: int) -> int:
    machine.stack.append(None)
    return position


def newtrue(machine: Machine, position: int) -> int:
    machine.stack.append(True)
    return position


def newfalse(machine: Machine, position: int) -> int:
    machine.stack.append(False)
    return position


def binint1(machine: Machine, position: int) -> int:
    machine.stack.append(machine.data[position])
    return position + 1


def binint2(machine: Machine, position: int) -> int:
    machine.push(UINT16(machine.data, position)[0])
    return position + 2


def binint(machine: Machine, position: int) -> int:
    machine.push(INT32(machine.data, position)[0])
    return position + 4


def long1(machine: Machine, position: int) -> int:
    return _push_long(machine, position + 1, machine.data[position])


def long4(machine: Machine, position: int) -> int:
    return _push_long(machine, position + 4, INT32(machine.data, position)[0])


def _push_long(machine: Machine, position: int, size: int) -> int:
    if not 0 <= size <= machine.limits.integer_bytes:
        raise FormatError(f"the pickle has an integer of {size} bytes")
    machine.push(int.from_bytes(machine.take(position, size), "little", signed=True))
    return position + size


def int_(machine: Machine, position: int) -> int:
    line, position = machine.take_line(position)
    machine.push(BOOLS[line] if line in BOOLS else machine.parse_integer(line))
    return position


def long_(machine: Machine, position: int) -> int:
    line, position = machine.take_line(position)
    machine.push(machine.parse_integer(line.removesuffix(b"L")))
    return position


def float_(machine: Machine, position: int) -> int:
    line, position = machine.take_line(position)
    if len(line) > machine.limits.number_digits:
        raise FormatError(f"the pickle has a number of {len(line)} digits")
    machine.push(float(line))
    return position


def binfloat(machine: Machine, position: int) -> int:
    machine.push(DOUBLE(machine.data, position)[0])
    return position + 8


def binunicode(machine: Machine, position: int) -> int:
    return _push_text(machine, position + 4, UINT32(machine.data, position)[0])


def short_binunicode(machine: Machine, position: int) -> int:
    return _push_text(machine, position + 1, machine.data[position])


def binunicode8(machine: Machine, position: int) -> int:
    return _push_text(machine, position + 8, UINT64(machine.data, position)[0])


def _push_text(machine: Machine, position: int, size: int) -> int:
    # Lone surrogates, which no terminal and no JSON takes, are shown as escapes.
    machine.push(machine.take(position, size).decode("utf-8", "backslashreplace"))
    return position + size


def unicode_(machine: Machine, position: int) -> int:
    line, position = machine.take_line(position)
    text = line.decode("raw_unicode_escape")
    machine.push(text.encode("utf-8", "backslashreplace").decode("utf-8"))
    return position


def short_binstring(machine: Machine, position: int) -> int:
    return _push_string(machine, position + 1, machine.data[position])


def binstring(machine: Machine, position: int) -> int:
    return _push_string(machine, position + 4, UINT32(machine.data, position)[0])


def string(machine: Machine, position: int) -> int:
    line, position = machine.take_line(position)
    if len(line) < 2 or line[:1] not in (b"'", b'"') or line[:1] != line[-1:]:
        raise FormatError("the pickle has a string without quotes")
    machine.push(_text_if_possible(line[1:-1].decode("unicode_escape").encode("latin-1")))
    return position


def _push_string(machine: Machine, position: int, size: int) -> int:
    machine.push(_text_if_possible(machine.take(position, size)))
    return position + size


def _text_if_possible(data: bytes) -> str | bytes:
    """Python 2 had one type for text and bytes."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data


def short_binbytes(machine: Machine, position: int) -> int:
    return _push_bytes(machine, position + 1, machine.data[position])


def binbytes(machine: Machine, position: int) -> int:
    return _push_bytes(machine, position + 4, UINT32(machine.data, position)[0])


def binbytes8(machine: Machine, position: int) -> int:
    return _push_bytes(machine, position + 8, UINT64(machine.data, position)[0])


def _push_bytes(machine: Machine, position: int, size: int) -> int:
    machine.push(machine.take(position, size))
    return position + size


LITERALS: dict[bytes, Operation] = {
    b"N": none,
    b"\x88": newtrue,
    b"\x89": newfalse,
    b"K": binint1,
    b"M": binint2,
    b"J": binint,
    b"\x8a": long1,
    b"\x8b": long4,
    b"I": int_,
    b"L": long_,
    b"F": float_,
    b"G": binfloat,
    b"X": binunicode,
    b"\x8c": short_binunicode,
    b"\x8d": binunicode8,
    b"V": unicode_,
    b"U": short_binstring,
    b"T": binstring,
    b"S": string,
    b"C": short_binbytes,
    b"B": binbytes,
    b"\x8e": binbytes8,
    b"\x96": binbytes8,
}
