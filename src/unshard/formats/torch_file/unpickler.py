"""Runs a pickle on the machine, and turns whatever its bytes do to the machine into a FormatError."""

from __future__ import annotations

import struct
from typing import Any

from unshard.errors import FormatError
from unshard.formats.torch_file.limits import Limits
from unshard.formats.torch_file.literals import LITERALS
from unshard.formats.torch_file.machine import Budget, Builder, Machine, Operation, PickleEndsError
from unshard.formats.torch_file.opcodes import OPCODES

STOP = ord(".")


def _unknown(machine: Machine, position: int) -> int:
    raise FormatError(f"no pickle: unknown opcode 0x{machine.data[position - 1]:02x}")


_KNOWN = {**LITERALS, **OPCODES}
OPERATIONS: list[Operation] = [_KNOWN.get(bytes([code]), _unknown) for code in range(256)]
"""What each opcode does."""


def unpickle(data: bytes, builder: Builder, budget: Budget, limits: Limits) -> tuple[Any, int]:
    """The object that the pickle at the start of `data` describes, and the position after its end.

    PickleEndsError where the data are not enough, FormatError where they are no pickle that we read.
    """
    machine = Machine(data, builder, budget, limits)
    position = 0
    try:
        for _ in range(limits.operations):
            code = data[position]
            if code == STOP:
                return _result(machine), position + 1
            position = OPERATIONS[code](machine, position + 1)
    except FormatError as error:
        raise type(error)(f"{error.message} (byte {position} of the pickle)", hint=error.hint) from None
    except (LookupError, ValueError, TypeError, OverflowError, RecursionError, struct.error) as error:
        if position + 1 >= len(data) or isinstance(error, struct.error):
            raise PickleEndsError(f"the pickle ends early, at its byte {len(data)}") from None
        raise FormatError(f"the pickle is damaged at its byte {position}") from error
    raise FormatError(f"the pickle has more than {limits.operations} operations")


def _result(machine: Machine) -> Any:
    if len(machine.stack) != 1 or machine.marks:
        raise FormatError("the pickle is damaged: it leaves other than one object")
    return machine.stack.pop()
