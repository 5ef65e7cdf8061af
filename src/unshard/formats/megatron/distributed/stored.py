"""What a backend finds in a directory, under its own keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unshard.checkpoint import Note
from unshard.errors import UnshardError
from unshard.formats.dcp.objects import Item
from unshard.tensors import Tensor


@dataclass(slots=True)
class Stored:
    """Tensors and what lies beside them.

    tensors:  key → tensor, whole.
    left_out: keys that are not read: no parameters of the model, or no tensors.
    items:    those of them whose content can be read.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    items: Mapping[str, Item] = field(default_factory=dict)
    problems: list[UnshardError] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
