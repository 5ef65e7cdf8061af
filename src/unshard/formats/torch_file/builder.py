"""What stands for the classes, calls and states of a pickle: records, and a short list of values that we know.

The list is `REDUCERS` (of `reducers.py`). All else becomes an `Opaque` record of its class and arguments.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from unshard.dtypes import BY_TORCH_NAME
from unshard.errors import FormatError
from unshard.formats.torch_file.limits import Limits
from unshard.formats.torch_file.machine import Budget
from unshard.formats.torch_file.records import Global, Opaque, StoredTensor, WrapperSubclass
from unshard.formats.torch_file.reducers import REDUCERS, merge_states
from unshard.formats.torch_file.storages import Storages

RECORD_COST = 4
GETATTR = ("builtins.getattr", "__builtin__.getattr")


class RecordBuilder:
    """The builder of torch files. `globals` collects every class and function that the pickle named."""

    def __init__(self, storages: Storages, budget: Budget, limits: Limits) -> None:
        self._storages = storages
        self._budget = budget
        self._limits = limits
        self._found: dict[tuple[str, str], Any] = {}

    @property
    def globals(self) -> frozenset[str]:
        return frozenset([f"{module}.{name}" for module, name in self._found])

    def find(self, module: str, name: str) -> Any:
        """The record of a class or function; of a torch dtype that we hold, the DType."""
        found = self._found.get((module, name))
        if found is None:
            length = len(module) + len(name)
            if length > self._limits.name_length:
                raise FormatError(f"the pickle names a class by {length} characters")
            self._budget.spend(RECORD_COST + length // 16)
            found = BY_TORCH_NAME.get(name) if module == "torch" else None
            found = found or Global(module, name)
            self._found[module, name] = found
        return found

    def call(self, function: Any, args: Any, kwargs: Mapping[str, Any] | None = None) -> Any:
        """The value of a known call, else an opaque record of it."""
        if not isinstance(function, Global):
            raise FormatError(f"the pickle calls something that is no class or function: {type(function).__name__}")
        if not isinstance(args, tuple):
            raise FormatError(f"the pickle calls {function.path} with arguments that are no tuple")
        self._budget.spend(RECORD_COST)
        if kwargs:
            return Opaque(function, args, kwargs)
        path = function.path
        reducer = REDUCERS.get(path)
        if reducer is None:
            return self._get_nested(function, args) if path in GETATTR else Opaque(function, args)
        try:
            return reducer(function, args, self._budget)
        except FormatError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError, struct.error) as error:
            raise FormatError(f"the pickle calls {path} with arguments that torch never writes") from error

    def _get_nested(self, function: Global, args: tuple[Any, ...]) -> Any:
        """`getattr(Outer, "Inner")` is how old protocols name a nested class; any other use stays a record."""
        if len(args) == 2 and isinstance(args[0], Global) and isinstance(args[1], str):
            return self.find(args[0].module, f"{args[0].name}.{args[1]}")
        return Opaque(function, args)

    def build(self, target: Any, state: Any) -> Any:
        """`target` with its state. Attributes of a plain dict (`_metadata` of a state dict) are of no use here."""
        if isinstance(target, (Opaque, WrapperSubclass)):
            target.state = merge_states(target.state, state, self._budget)
        elif isinstance(target, StoredTensor) and isinstance(state, dict):
            target.attributes = merge_states(target.attributes, state, self._budget)
        elif type(target) is not dict or not isinstance(state, dict):
            raise FormatError(f"the pickle sets the state of an object of kind {type(target).__name__}")
        return target

    def load(self, reference: Any) -> Any:
        """The storage (or, in old files, the class) that a persistent id stands for."""
        return self._storages.load(reference)
