"""NeMo 2's `context/io.json`: a graph of configured objects, as the library fiddle serialises it.

Source: google/fiddle fiddle/_src/experimental/serialization.py; NeMo nemo/lightning/io/mixin.py (`io_dump`), which
writes what was set by the caller only: the defaults of NeMo's classes are in `context/model.yaml`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_MEMBER = re.compile(r"(?:Attr\(name=|Key\(key=)'(\w{1,100})'\)")
_MAX_DEPTH = 8
_MAX_VALUES = 50_000
"""Objects that share others can hold very many."""
_OBJECT = {"_target_": "object"}
"""What stands for an object among values, in the words of NeMo's YAML."""


class ObjectGraph:
    """The objects of an io.json. Nothing is followed before it is asked for, and no deeper than settings nest."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        objects = document.get("objects")
        self._objects: Mapping[str, Any] = objects if isinstance(objects, Mapping) else {}
        self._root = document.get("root")
        self._left = _MAX_VALUES

    def members(self, *path: str) -> dict[str, Any]:
        """The members of the object at a path of attributes from the root; {} where there is none."""
        node = self._root
        for name in path:
            node = dict(self._items(node)).get(name)
        return {name: self._value(item, 0) for name, item in self._items(node)}

    def _items(self, node: object) -> Iterator[tuple[str, Any]]:
        """The named children of an object."""
        items = self._resolve(node).get("items")
        for item in items if isinstance(items, list) else []:
            if isinstance(item, list) and len(item) == 2 and isinstance(item[0], str):
                name = _MEMBER.fullmatch(item[0])
                if name:
                    yield name[1], item[1]

    def _resolve(self, node: object) -> Mapping[str, Any]:
        """The object that a reference leads to, or the node itself; {} for plain values."""
        if isinstance(node, Mapping) and node.get("type") == "ref" and isinstance(node.get("key"), str):
            node = self._objects.get(node["key"])
        return node if isinstance(node, Mapping) else {}

    def _value(self, node: object, depth: int) -> Any:
        """A plain value, a list of such, the name of a function, a class or an enum's member, or `_OBJECT`."""
        self._left -= 1
        if not isinstance(node, Mapping):
            return node
        if node.get("type") == "leaf":
            return node.get("value")
        if node.get("type") == "pyref":
            return _name_of(node)
        held = self._resolve(node)
        items, kind = held.get("items"), held.get("type")
        if self._left < 0 or depth > _MAX_DEPTH or not isinstance(items, list) or not isinstance(kind, Mapping):
            return _OBJECT
        if kind.get("name") not in ("list", "tuple") or not all(isinstance(item, list) and item for item in items):
            return _OBJECT
        return [self._value(item[-1], depth + 1) for item in items]


def _name_of(reference: Mapping[str, Any]) -> str:
    """`torch.bfloat16`, `torch.nn.functional.silu`; of an enum's member, `flash` of `AttnBackend.flash`."""
    module, name = str(reference.get("module")), str(reference.get("name"))
    return f"{module}.{name}" if "." not in name else name.rpartition(".")[2]
