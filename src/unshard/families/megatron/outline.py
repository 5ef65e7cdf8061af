"""What the tensors of a Megatron model show of its architecture: which parameters exist, in which layers, how large."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from unshard.checkpoint import Shape
from unshard.families.megatron.aliases import resolve_alias
from unshard.tensors import Value

_LAYER = re.compile(r"decoder\.layers\.(\d{1,6})\.(.+)")


@dataclass(frozen=True, slots=True)
class Outline:
    """The shapes of a language model's parameters, without adapters.

    outside: name → shape of what lies outside the layers.
    inside:  name below the layer, as local layers have it ("mlp.linear_fc1.weight") → layer → shape.
    """

    outside: Mapping[str, Shape]
    inside: Mapping[str, Mapping[int, Shape]]

    @property
    def layers(self) -> int:
        """The number of layers, up to the last that has a parameter."""
        return max([layer for shapes in self.inside.values() for layer in shapes], default=-1) + 1

    def shape(self, name: str) -> Shape | None:
        """The shape in the first layer that has the parameter; None where no layer does."""
        shapes = self.inside.get(name)
        return shapes[min(shapes)] if shapes else None

    def size(self, name: str, axis: int) -> int | None:
        """The size of an axis; None where no layer has the parameter, or it has no such axis."""
        shape = self.shape(name)
        return shape[axis] if shape is not None and len(shape) > axis else None

    def has(self, *names: str) -> bool:
        """Whether any of these parameters exists, in any layer."""
        return any(name in self.inside for name in names)

    def all_shapes(self) -> Iterator[Shape]:
        yield from self.outside.values()
        for shapes in self.inside.values():
            yield from shapes.values()

    def layers_of(self, name: str) -> list[int]:
        return sorted(self.inside.get(name, ()))


def outline(tensors: Mapping[str, Value]) -> Outline:
    """The outline of a canonical Megatron catalog."""
    outside: dict[str, Shape] = {}
    inside: dict[str, dict[int, Shape]] = defaultdict(dict)
    for stored, value in tensors.items():
        if ".adapter" in stored:
            continue
        name = resolve_alias(stored)
        if match := _LAYER.fullmatch(name):
            inside[match[2]][int(match[1])] = value.shape
        else:
            outside[name] = value.shape
    return Outline(outside, dict(inside))
