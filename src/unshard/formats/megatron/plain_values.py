"""What training pickled or serialised of its settings, as plain JSON values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from unshard.dtypes import BY_TORCH_NAME, DType
from unshard.formats.torch_file import Global, Opaque

_MAX_DEPTH = 8
_MAX_TEXT = 4096
_MAX_VALUES = 50_000
_MAX_INTEGER = 1 << 63
"""No setting is as large, and Python refuses to print the largest that a file can hold."""


def plain_members(recorded: object) -> dict[str, Any]:
    """The members of a Namespace (an inert record), or of a dict, that are plain JSON or have a plain name.

    | what                                                    | becomes                                              |
    |---------------------------------------------------------|------------------------------------------------------|
    | a torch dtype                                           | its name without `torch.`: "bfloat16"                |
    | a class or a function                                   | its path: "torch.nn.functional.silu"                 |
    | an enum of text values, or one whose member is named    | the value, or the name                               |
    | `{_target_, _call_, _args_}` (Megatron's and NeMo's YAML) | the same, for what it stands for                   |
    | all else: objects, tensors, enums of numbers, NaN,      | is left out, and a list that holds such a value too  |
    | integers beyond 64 bits                                 |                                                      |
    """
    members = recorded.state if isinstance(recorded, Opaque) else recorded
    if not isinstance(members, Mapping):
        return {}
    found = _Plainer().convert(members)
    return found if isinstance(found, dict) else {}


class _NotPlain:
    """The kind of `_NOT_PLAIN`, which stands for a value that is no plain JSON."""


_NOT_PLAIN = _NotPlain()


class _Plainer:
    """Converts values; what is shared is walked over again and again, hence the budget."""

    def __init__(self) -> None:
        self.left = _MAX_VALUES

    def convert(self, value: object, depth: int = 0) -> Any:
        """The value as plain JSON, or `_NOT_PLAIN`."""
        self.left -= 1
        if self.left < 0 or depth > _MAX_DEPTH:
            return _NOT_PLAIN
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return value if abs(value) < _MAX_INTEGER else _NOT_PLAIN
        if isinstance(value, float):
            return value if math.isfinite(value) else _NOT_PLAIN
        if isinstance(value, str):
            return _without_torch(value) if len(value) <= _MAX_TEXT else _NOT_PLAIN
        if isinstance(value, DType):
            return value.torch_name
        if isinstance(value, Global):
            return _without_torch(value.path)
        if isinstance(value, Opaque):
            return _only_text(value.args)
        if isinstance(value, (list, tuple)):
            items = [self.convert(item, depth + 1) for item in value]
            return _NOT_PLAIN if any(item is _NOT_PLAIN for item in items) else items
        if isinstance(value, Mapping):
            return self._convert_mapping(value, depth)
        return _NOT_PLAIN

    def _convert_mapping(self, value: Mapping[Any, Any], depth: int) -> Any:
        if "_target_" in value and depth > 0:
            return _stands_for(value)
        members = {
            key: self.convert(item, depth + 1) for key, item in value.items() if isinstance(key, str) and key[:1] != "_"
        }
        return {key: item for key, item in members.items() if item is not _NOT_PLAIN}


def _stands_for(node: Mapping[Any, Any]) -> Any:
    """What `{_target_: …}` stands for: a function, class or dtype where nothing is called; else an enum's member."""
    target, name = node["_target_"], node.get("_name_")
    if node.get("_call_") is False and isinstance(target, str):
        return _without_torch(target)
    text = _only_text(node.get("_args_"))
    return name if text is _NOT_PLAIN and isinstance(name, str) else text


def _only_text(args: object) -> Any:
    """The only argument of a call, where it is text: the value of an enum's member."""
    if isinstance(args, (list, tuple)) and len(args) == 1 and isinstance(args[0], str) and len(args[0]) <= _MAX_TEXT:
        return args[0]
    return _NOT_PLAIN


def _without_torch(text: str) -> str:
    """`bfloat16` of `torch.bfloat16`; all else as it is."""
    name = text.removeprefix("torch.")
    return name if name in BY_TORCH_NAME else text
