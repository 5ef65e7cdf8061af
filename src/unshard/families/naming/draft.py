"""A model on its way to its names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from unshard.checkpoint import Level, Note, Shape
from unshard.dtypes import F32
from unshard.errors import UnshardError
from unshard.model import Model
from unshard.target import Claim
from unshard.tensors import Tensor, Value


@dataclass(slots=True)
class Draft:
    """What the steps of naming work on, one after the other; its parts become those of `Model`.

    origins: present name → the stored names that the tensor was made from.
    """

    tensors: dict[str, Value]
    origins: dict[str, tuple[str, ...]]
    family: str | None = None
    claims: list[Claim] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    problems: list[UnshardError] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    config_changes: dict[str, Any] = field(default_factory=dict)
    layout: Mapping[str, str] | None = None
    uncast: frozenset[str] = frozenset()

    @classmethod
    def of(cls, tensors: Mapping[str, Value]) -> Draft:
        """All tensors under their stored names."""
        return cls(dict(tensors), {name: (name,) for name in tensors})

    def note(self, text: str, tensors: tuple[str, ...] = (), level: Level = "note") -> None:
        self.notes.append(Note(text, tensors, level))

    def drop(self, name: str, reason: str) -> Value:
        """Take a tensor out of the output, and remember why."""
        for origin in self.origins.pop(name):
            self.dropped[origin] = reason
        return self.tensors.pop(name)

    def expect(self, shapes: Mapping[str, Shape]) -> None:
        """Let tensors without bytes stand for parameters that were left out, so that these get their names with all."""
        for name, shape in shapes.items():
            self.tensors[name], self.origins[name] = Tensor(name, F32, shape, ()), (name,)

    def take_out(self, expected: Collection[str]) -> dict[str, Shape]:
        """Name → shape of what stands for those parameters by now; it is no longer among the tensors."""
        found = [name for name, origins in self.origins.items() if all(origin in expected for origin in origins)]
        for name in found:
            del self.origins[name]
        return {name: self.tensors.pop(name).shape for name in found}

    def replace(self, tensors: dict[str, Value], origins: Mapping[str, tuple[str, ...]]) -> None:
        """Put other tensors in place; `origins` names the present ones that each was made from."""
        self.origins = {
            name: tuple([stored for present in origins[name] for stored in self.origins[present]]) for name in tensors
        }
        self.tensors = tensors

    def finish(self) -> Model:
        return Model(
            tensors=self.tensors,
            family=self.family,
            claims=tuple(self.claims),
            notes=tuple(self.notes),
            problems=tuple(self.problems),
            dropped=self.dropped,
            config_changes=self.config_changes,
            layout=self.layout,
            uncast=self.uncast,
        )
