"""The opcodes of pickle that move, remember and combine objects (CPython, `Lib/pickletools.py`), protocols 0 to 5.

A function is given the machine and the position after its opcode, and returns the position of the next one. Opcodes
that reach out of the file (extension registry, out-of-band buffers) are refused by name.
"""

from __future__ import annotations

from typing import Any

from unshard.errors import FormatError
from unshard.formats.torch_file.literals import UINT32, UINT64
from unshard.formats.torch_file.machine import Machine, Operation, PickleEndsError

HIGHEST_PROTOCOL = 5
STORAGE_COST = 8


def proto(machine: Machine, position: int) -> int:
    if machine.data[position] > HIGHEST_PROTOCOL:
        raise FormatError(f"pickle protocol {machine.data[position]} is not known")
    return position + 1


def frame(machine: Machine, position: int) -> int:
    (size,) = UINT64(machine.data, position)
    if position + 8 + size > len(machine.data):
        raise PickleEndsError("the pickle ends early, inside a frame")
    return position + 8


def mark(machine: Machine, position: int) -> int:
    machine.marks.append(len(machine.stack))
    return position


def pop(machine: Machine, position: int) -> int:
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
    else:
        machine.stack.pop()
    return position


def pop_mark(machine: Machine, position: int) -> int:
    machine.pop_to_mark()
    return position


def dup(machine: Machine, position: int) -> int:
    machine.stack.append(machine.stack[-1])
    return position


def binput(machine: Machine, position: int) -> int:
    machine.remember(machine.data[position])
    return position + 1


def long_binput(machine: Machine, position: int) -> int:
    machine.remember(UINT32(machine.data, position)[0])
    return position + 4


def put(machine: Machine, position: int) -> int:
    index, position = machine.take_integer(position)
    machine.remember(index)
    return position


def memoize(machine: Machine, position: int) -> int:
    machine.remember(len(machine.memo) + len(machine.scattered))
    return position


def binget(machine: Machine, position: int) -> int:
    machine.recall(machine.data[position])
    return position + 1


def long_binget(machine: Machine, position: int) -> int:
    machine.recall(UINT32(machine.data, position)[0])
    return position + 4


def get(machine: Machine, position: int) -> int:
    index, position = machine.take_integer(position)
    machine.recall(index)
    return position


def empty_tuple(machine: Machine, position: int) -> int:
    machine.stack.append(())
    return position


def empty_list(machine: Machine, position: int) -> int:
    machine.push([])
    return position


def empty_dict(machine: Machine, position: int) -> int:
    machine.push({})
    return position


def tuple1(machine: Machine, position: int) -> int:
    machine.stack[-1] = (machine.stack[-1],)
    machine.budget.spend(1)
    return position


def tuple2(machine: Machine, position: int) -> int:
    stack = machine.stack
    second = stack.pop()
    stack[-1] = (stack[-1], second)
    machine.budget.spend(1)
    return position


def tuple3(machine: Machine, position: int) -> int:
    stack = machine.stack
    third = stack.pop()
    second = stack.pop()
    stack[-1] = (stack[-1], second, third)
    machine.budget.spend(1)
    return position


def tuple_(machine: Machine, position: int) -> int:
    machine.push(tuple(machine.pop_to_mark()))
    return position


def list_(machine: Machine, position: int) -> int:
    machine.push(machine.pop_to_mark())
    return position


def dict_(machine: Machine, position: int) -> int:
    target: dict[Any, Any] = {}
    machine.set_items(target, machine.pop_to_mark())
    machine.push(target)
    return position


def empty_set(machine: Machine, position: int) -> int:
    return _call(machine, position, machine.builder.find("builtins", "set"), ())


def frozenset_(machine: Machine, position: int) -> int:
    items = machine.pop_to_mark()
    position = _call(machine, position, machine.builder.find("builtins", "frozenset"), ())
    machine.append_to(machine.stack[-1], items)
    return position


def append(machine: Machine, position: int) -> int:
    item = machine.stack.pop()
    machine.append_to(machine.stack[-1], (item,))
    return position


def appends(machine: Machine, position: int) -> int:
    items = machine.pop_to_mark()
    machine.append_to(machine.stack[-1], items)
    return position


def setitem(machine: Machine, position: int) -> int:
    value = machine.stack.pop()
    key = machine.stack.pop()
    machine.set_items(machine.stack[-1], (key, value))
    return position


def setitems(machine: Machine, position: int) -> int:
    flat = machine.pop_to_mark()
    machine.set_items(machine.stack[-1], flat)
    return position


def global_(machine: Machine, position: int) -> int:
    module, position = machine.take_line(position)
    name, position = machine.take_line(position)
    machine.stack.append(machine.builder.find(module.decode("utf-8"), name.decode("utf-8")))
    return position


def stack_global(machine: Machine, position: int) -> int:
    name = machine.stack.pop()
    module = machine.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise FormatError("the pickle names a class by other than text")
    machine.stack.append(machine.builder.find(module, name))
    return position


def reduce(machine: Machine, position: int) -> int:
    """REDUCE and NEWOBJ: a function or a class, and what it is called with."""
    args = machine.stack.pop()
    machine.stack[-1] = machine.builder.call(machine.stack[-1], args)
    return position


def newobj_ex(machine: Machine, position: int) -> int:
    kwargs = machine.stack.pop()
    args = machine.stack.pop()
    if not isinstance(kwargs, dict):
        raise FormatError("the pickle makes a call whose keyword arguments are no dict")
    machine.stack[-1] = machine.builder.call(machine.stack[-1], args, kwargs)
    return position


def inst(machine: Machine, position: int) -> int:
    module, position = machine.take_line(position)
    name, position = machine.take_line(position)
    function = machine.builder.find(module.decode("utf-8"), name.decode("utf-8"))
    return _call(machine, position, function, tuple(machine.pop_to_mark()))


def obj(machine: Machine, position: int) -> int:
    function, *args = machine.pop_to_mark()
    return _call(machine, position, function, tuple(args))


def _call(machine: Machine, position: int, function: Any, args: tuple[Any, ...]) -> int:
    machine.stack.append(machine.builder.call(function, args))
    return position


def build(machine: Machine, position: int) -> int:
    state = machine.stack.pop()
    machine.stack[-1] = machine.builder.build(machine.stack[-1], state)
    return position


def binpersid(machine: Machine, position: int) -> int:
    machine.budget.spend(STORAGE_COST)
    machine.stack[-1] = machine.builder.load(machine.stack[-1])
    return position


def persid(machine: Machine, position: int) -> int:
    line, position = machine.take_line(position)
    machine.stack.append(machine.builder.load(line))
    return position


def ext(machine: Machine, position: int) -> int:
    raise FormatError("the pickle refers to Python's extension registry, which is not part of the file")


def buffer(machine: Machine, position: int) -> int:
    raise FormatError("the pickle refers to buffers that were not saved with it")


OPCODES: dict[bytes, Operation] = {
    b"\x80": proto,
    b"\x95": frame,
    b"(": mark,
    b"0": pop,
    b"1": pop_mark,
    b"2": dup,
    b"q": binput,
    b"r": long_binput,
    b"p": put,
    b"\x94": memoize,
    b"h": binget,
    b"j": long_binget,
    b"g": get,
    b")": empty_tuple,
    b"]": empty_list,
    b"}": empty_dict,
    b"\x85": tuple1,
    b"\x86": tuple2,
    b"\x87": tuple3,
    b"t": tuple_,
    b"l": list_,
    b"d": dict_,
    b"\x8f": empty_set,
    b"\x91": frozenset_,
    b"a": append,
    b"e": appends,
    b"\x90": appends,
    b"s": setitem,
    b"u": setitems,
    b"c": global_,
    b"\x93": stack_global,
    b"R": reduce,
    b"\x81": reduce,
    b"\x92": newobj_ex,
    b"i": inst,
    b"o": obj,
    b"b": build,
    b"Q": binpersid,
    b"P": persid,
    b"\x82": ext,
    b"\x83": ext,
    b"\x84": ext,
    b"\x97": buffer,
    b"\x98": buffer,
}
