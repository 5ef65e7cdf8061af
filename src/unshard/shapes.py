"""The shapes of a model's parameters, for layouts that do not store them.

FSDP1's flat parameters store neither names nor shapes: they ask for both in order (`Source.known_shapes`). torch's
safetensors shards have names, but not where a tensor ends (`Source.named_shapes`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from unshard.checkpoint import Checkpoint, Note, Shape
from unshard.errors import ModelError
from unshard.wrappers import strip_components

_Shapes: TypeAlias = Mapping[str, Shape]

_VERSIONS = ("4.57.0", "5.0.0")
"""Of transformers: before and after experts were packed."""


@dataclass(slots=True)
class ShapeTeller:
    """Answers `Source.known_shapes`, and with `by_names` `Source.named_shapes`.

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

    def by_names(self, config: Mapping[str, Any] | None, names: Collection[str]) -> Mapping[str, Shape] | None:
        """The shapes under the names that are stored, of the running model or of its file, whichever fit more of them.

        Wrappers around the names do not count. None where none of the names is known.
        """
        bare = {name: _bare(name) for name in names}
        best: dict[str, Shape] = {}
        most = 0
        for must, may in self._candidates(config):
            known = {**may, **must}
            level = _level_of(bare.values(), known)
            found = {name: known[inner] for name in bare if (inner := bare[name].removeprefix(level)) in known}
            if len(found) > most:
                there = {bare[name].removeprefix(level) for name in found}
                best = found | {name: shape for name, shape in must.items() if name not in there}
                most = len(found)
        return best if most else None

    def _candidates(self, config: Mapping[str, Any] | None) -> Iterator[tuple[_Shapes, _Shapes]]:
        """What a checkpoint must hold, and what it may hold besides, for each set of names that it can have."""
        if self.reference is not None:
            yield {name: tensor.shape for name, tensor in self.reference.tensors.items()}, {}
            config = self.reference.config
        from unshard import families  # late: hardly any checkpoint asks

        for source in (config, self.given if self.reference is None else None):
            try:
                both = [families.possible_shapes(source, in_file=in_file) for in_file in (False, True)]
            except ModelError:  # a size is missing: naming the model will tell which
                continue
            if both[0] is not None:
                yield from [shapes for shapes in both if shapes is not None]
                return

    @property
    def unordered(self) -> Checkpoint | None:
        """The reference, if the order of its shapes means nothing and its values must tell it."""
        return self.reference if self._ordered is None else None


def _bare(name: str) -> str:
    """A name without the wrappers of training, and without those of PEFT around a base layer."""
    return strip_components(name).replace(".base_layer.", ".")


def _level_of(names: Collection[str], known: Collection[str]) -> str:
    """The module, with its dot, that all names lie in and no known name does."""
    from unshard.families.naming.wrappers import extra_level  # late, as above

    return extra_level(names, known) or ""


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
