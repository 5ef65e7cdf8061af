"""Which architecture a config.json describes, and the parameters that it must have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unshard.checkpoint import Shape
from unshard.dtypes import F32
from unshard.families.rules import split
from unshard.families.sizes import Sizes
from unshard.families.template import HEADS, VALUE_HEAD, Extra, Family, expand
from unshard.model_config import class_name
from unshard.tensors import Tensor, Value

LANGUAGE_MODELS = ("ForCausalLM", "ForConditionalGeneration")
"""Endings of architectures whose head maps to the vocabulary."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A family with one of its heads and the sizes of one config. `ending` is that of the class name: "ForCausalLM"."""

    family: Family
    ending: str
    sizes: Sizes

    @property
    def name(self) -> str:
        """As in `architectures` of config.json: "Qwen2ForCausalLM"."""
        return self.family.prefix + self.ending

    @property
    def is_language_model(self) -> bool:
        return self.ending in LANGUAGE_MODELS

    def base_shapes(self) -> dict[str, Shape]:
        """Parameters of the running base model, in the order of torch's `named_parameters()`.

        Raises ModelError where config.json does not tell a size.
        """
        return expand(self.family.parameters, self.sizes)

    def hub_shapes(self) -> dict[str, Shape]:
        """Parameters of the base model in the file that `save_pretrained` writes."""
        return self._in_file(self.base_shapes())

    def extra_shapes(self) -> list[tuple[Extra, dict[str, Shape]]]:
        """What the file may hold besides: each set with its parameters, where the config has any of it."""
        shapes = [(extra, self._in_file(expand(extra.contents, self.sizes))) for extra in self.family.extras]
        return [(extra, expected) for extra, expected in shapes if expected]

    def head_shapes(self, *, tied: bool, value_head: bool = False) -> dict[str, Shape]:
        """Parameters behind the running base model.

        tied:       the language model's head is the embedding, and no parameter of its own.
        value_head: TRL's value head stands beside it.
        """
        shapes = {} if tied and self.is_language_model else expand(HEADS[self.ending], self.sizes)
        return shapes | expand(VALUE_HEAD, self.sizes) if value_head else shapes

    def hub_head_shapes(self, *, tied: bool, value_head: bool = False) -> dict[str, Shape]:
        """The same in the file."""
        return self._in_file(self.head_shapes(tied=tied, value_head=value_head))

    def _in_file(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        outlines: dict[str, Value] = {name: Tensor(name, F32, shape, ()) for name, shape in shapes.items()}
        return {name: value.shape for name, value in split(outlines, self.family.rules, self.sizes).tensors.items()}


def read_architecture(
    config: Mapping[str, Any],
    families: Mapping[str, Family],
    ending: str | None = None,
    given: Mapping[str, int | None] | None = None,
) -> Architecture | None:
    """The architecture that config.json names, or None where no family describes it.

    `ending` overrides the one of `architectures`; `given` holds sizes that the user told us.
    """
    family = families.get(str(config.get("model_type")))
    if family is None:
        return None
    if ending is None:
        name = class_name(config)
        ending = family.heads[0] if name is None else name.removeprefix(family.prefix)
    if ending not in family.heads:
        return None
    labels = {"num_labels": count_labels(config)}
    return Architecture(family, ending, Sizes(config, family.all_defaults(), {**labels, **(given or {})}))


def count_labels(config: Mapping[str, Any]) -> int:
    """The number of labels of a classifier: `num_labels`, else the size of `id2label`, else 2 as in transformers."""
    labels = config.get("id2label")
    number = config.get("num_labels", len(labels) if isinstance(labels, Mapping) else None)
    return number if isinstance(number, int) else 2
