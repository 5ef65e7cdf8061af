"""The shapes of a model's parameters in their order, for layouts that store neither (FSDP1's flat parameters)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unshard.checkpoint import Checkpoint, Note, Shape

_VERSIONS = ("4.57.0", "5.0.0")
"""Of transformers: before and after experts were packed."""


@dataclass(slots=True)
class ShapeTeller:
    """Answers `Source.known_shapes`.

    reference: the model that `--shapes-from` names; it goes first.
    given:     the config that `--config` brings, asked where the one beside the checkpoint says nothing.
    notes:     what the report must say of the answer.
    """

    reference: Checkpoint | None = None
    given: Mapping[str, Any] | None = None
    notes: list[Note] = field(default_factory=list)
    _ordered: Mapping[str, Shape] | None = field(init=False)

    def __post_init__(self) -> None:
        self._ordered = _shapes_in_order(self.reference) if self.reference else None

    def __call__(self, config: Mapping[str, Any] | None) -> Mapping[str, Shape] | None:
        """The shapes under the names of the running model. `config` lies beside the checkpoint: its run wrote it."""
        if self.reference is not None:
            return self._ordered or _shapes_of(self.reference)
        own = _family_shapes(config)
        if own is not None or self.given is None:
            return own
        shapes = _family_shapes(self.given)
        if shapes is not None and _shapes_of_any_version(self.given) is None:
            text = (
                "how experts lie in flat parameters depends on the version of transformers that trained: taken to be "
                f"{self.given.get('transformers_version', 'a new one')}, as the config of --config says"
            )
            self.notes.append(Note(text, level="warning"))
        return shapes

    @property
    def unordered(self) -> Checkpoint | None:
        """The reference, if the order of its shapes means nothing and its values must tell it."""
        return self.reference if self._ordered is None else None


def _shapes_in_order(reference: Checkpoint) -> Mapping[str, Shape] | None:
    """The shapes of a reference in the order of the model's definition; None where nobody knows that order.

    A family that describes exactly this model knows it, unless the order depends on the version that trained, which the
    reference need not share. So does a file that torch wrote from a running model; names in alphabetical order are
    those of safetensors, or came from them.
    """
    shapes = _shapes_of(reference)
    defined = _shapes_of_any_version(reference.config)
    if defined is not None and shapes in (defined, _family_shapes(reference.config, in_file=True)):
        return defined
    files = {chunk.extent.file.path for tensor in reference.tensors.values() for chunk in tensor.chunks}
    is_sorted = list(shapes) == sorted(shapes)
    return None if is_sorted or any(file.endswith(".safetensors") for file in files) else shapes


def _shapes_of(reference: Checkpoint) -> dict[str, Shape]:
    """By name; of names that are the same bytes, as tied ones are in files of torch, the first."""
    first = {tensor.chunks or name: name for name, tensor in reversed(list(reference.tensors.items()))}
    return {name: tensor.shape for name, tensor in reference.tensors.items() if first[tensor.chunks or name] == name}


def _shapes_of_any_version(config: Mapping[str, Any] | None) -> Mapping[str, Shape] | None:
    """What a family expects, if all versions of transformers run the model with the same parameters in one order."""
    if config is None:
        return None
    old, new = [_family_shapes({**config, "transformers_version": version}) for version in _VERSIONS]
    return new if old is not None and new is not None and list(old.items()) == list(new.items()) else None


def _family_shapes(config: Mapping[str, Any] | None, *, in_file: bool = False) -> Mapping[str, Shape] | None:
    from unshard import families  # late: hardly any checkpoint asks

    return families.expected_file_shapes(config) if in_file else families.expected_shapes(config)
