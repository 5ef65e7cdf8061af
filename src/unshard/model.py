"""The model that comes out: named values, not yet files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unshard.checkpoint import Note
from unshard.errors import UnshardError
from unshard.target import Claim
from unshard.tensors import Tensor, Value


@dataclass(frozen=True, slots=True)
class Adapter:
    """A PEFT adapter: the tensors under the names of `adapter_model.safetensors`, and the whole `adapter_config.json`.

    `name` is the adapter's name in the training run ("default").
    """

    name: str
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Base:
    """A base model that gives the parameters which a checkpoint was saved without.

    tensors: under the names of the file that `save_pretrained` writes.
    place:   where it lies, for people.
    lent:    names of tensors that were put among the checkpoint's own before these were named.
    """

    tensors: Mapping[str, Tensor]
    place: str
    lent: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Model:
    """Output name → value, in the order in which they are written, and what must be known about them.

    family:         what names and shapes were checked against ("Qwen2ForCausalLM"); None: nothing knows this type.
    claims:         equalities that the result rests on.
    problems:       all unknown, missing and misshapen names, at once.
    dropped:        stored name → why it is not in the output (a tied weight, a recomputed buffer).
    config_changes: keys of config.json that no longer hold (None deletes), each with a note.
    layout:         output name → file, where a reference model's layout is followed.
    uncast:         names of tensors that stay what they are under `--dtype`: the model needs their precision.
    """

    tensors: Mapping[str, Value]
    family: str | None = None
    claims: tuple[Claim, ...] = ()
    notes: tuple[Note, ...] = ()
    problems: tuple[UnshardError, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)
    config_changes: Mapping[str, Any] = field(default_factory=dict)
    layout: Mapping[str, str] | None = None
    uncast: frozenset[str] = frozenset()
