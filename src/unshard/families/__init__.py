"""Model families: the names and shapes of their parameters, as data. One module each, registered in `registry`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from unshard.checkpoint import Checkpoint, Shape
from unshard.dtypes import F32
from unshard.errors import ModelError
from unshard.families.architecture import read_architecture
from unshard.families.naming import name_tensors
from unshard.families.registry import Families
from unshard.families.rules import Rule, join
from unshard.families.sizes import Sizes
from unshard.families.template import Family
from unshard.families.transformers5 import rules_for
from unshard.model import Base, Model
from unshard.model_config import is_tied
from unshard.options import MergeOptions
from unshard.tensors import Tensor, Value

if TYPE_CHECKING:
    from unshard.families.megatron.configuration import Derived
    from unshard.families.translation import Translation

FAMILIES: Mapping[str, Family] = Families()
"""By `model_type` of config.json."""
_NONE: Mapping[str, Shape] = MappingProxyType({})


def translate(checkpoint: Checkpoint, config: Mapping[str, Any], rules: Sequence[Rule] = ()) -> Translation:
    """The tensors of a checkpoint in another framework's dialect, under the names of the Hugging Face file.

    config: the parsed config.json of the model. rules: the user's own, asked before those of the model's family.

    Nothing is raised for what is wrong with the checkpoint: all of it is in `Translation.problems`.
    """
    # late: few merges need either
    if checkpoint.dialect == "torchtitan":
        from unshard.families.torchtitan.translation import translate as translate_names
    else:
        from unshard.families.megatron.translation import translate as translate_names

    return translate_names(checkpoint, config, FAMILIES.get(str(config.get("model_type"))), rules)


def derive_config(facts: Mapping[str, Any], tensors: Mapping[str, Value]) -> Derived:
    """A config.json for a model in Megatron's dialect that has none, from what training recorded and the shapes."""
    from unshard.families.megatron import configuration  # late: few merges need it

    return configuration.derive_config(facts, tensors)


def outline(config: Mapping[str, Any] | None) -> Mapping[str, Tensor]:
    """The parameters that config.json gives the file, as tensors of no bytes; none where nothing tells them."""
    architecture = read_architecture(config or {}, FAMILIES)
    if architecture is None:
        return {}
    try:
        shapes = architecture.hub_shapes() | architecture.hub_head_shapes(tied=False)
    except ModelError:
        return {}
    return {name: Tensor(name, F32, shape, ()) for name, shape in shapes.items()}


def name_as_running(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None, *, packed: bool = False
) -> Mapping[str, Tensor]:
    """Tensors under names of the Hugging Face file, and adapters, by the names that the running model has for them.

    As far as these differ in nothing else: what transformers 5 also packs keeps its name, and with `packed` stands
    there a second time, packed.
    """
    family = FAMILIES.get(str((config or {}).get("model_type")))
    rules = family.rules if family else rules_for(config or {})
    sizes = Sizes(config or {})
    named = join(tensors, [rule for rule in rules if not rule.steps], sizes).tensors
    if packed:
        named |= join(tensors, rules, sizes).tensors
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def name_model(
    tensors: Mapping[str, Value],
    config: Mapping[str, Any] | None,
    options: MergeOptions,
    reference: Checkpoint | None = None,
    *,
    in_file: bool = False,
    own: Collection[str] = (),
    source: str = "SRC",
    excluded: Mapping[str, Shape] = _NONE,
    base: Base | None = None,
) -> Model:
    """The model that comes out: stored tensors under the names that `options.names` asks for.

    config:    the parsed config.json that belongs to the checkpoint, if any.
    reference: the catalog of the model whose names and files are followed, where `options.names` is a directory.
    in_file:   the names are those of the Hugging Face file already: translated, not those of a running model.
    own:       names that the user gave himself: they are written, whatever the architecture has.
    source:    where the checkpoint lies, for hints.
    excluded:  parameters that the checkpoint records as left out when it was saved, under their stored names.
    base:      the model that gives what is not there.

    Nothing is raised for what is wrong with the checkpoint: all of it is in `Model.problems`.
    """
    return name_tensors(
        tensors,
        config,
        options,
        reference,
        FAMILIES,
        in_file=in_file,
        own=own,
        source=source,
        excluded=excluded,
        base=base,
    )


def is_known(config: Mapping[str, Any]) -> bool:
    """Whether a family describes the architecture that config.json names, with its head."""
    return read_architecture(config, FAMILIES) is not None


def expected_shapes(config: Mapping[str, Any] | None) -> Mapping[str, Shape] | None:
    """Parameter name → shape of the running model, in the order of torch's `named_parameters()`; tied ones once.

    None where no family describes the configuration. Raises ModelError where the configuration lacks a size.
    """
    architecture = read_architecture(config, FAMILIES) if config is not None else None
    if config is None or architecture is None:
        return None
    return architecture.base_shapes() | architecture.head_shapes(tied=is_tied(config))


def possible_shapes(
    config: Mapping[str, Any] | None, *, in_file: bool = False
) -> tuple[Mapping[str, Shape], Mapping[str, Shape]] | None:
    """What a checkpoint of this model must hold, and what it may hold besides: parameter name → shape, twice.

    It may hold a head that is tied to the embedding, TRL's value head, and what only files have (layers that predict
    further tokens). in_file: the names and packs are those of the file, not those of the running model. None where no
    family describes the configuration. Raises ModelError where the configuration lacks a size.
    """
    architecture = read_architecture(config, FAMILIES) if config is not None else None
    if config is None or architecture is None:
        return None
    base, head = architecture.base_shapes, architecture.head_shapes
    if in_file:
        base, head = architecture.hub_shapes, architecture.hub_head_shapes
    extras = {name: shape for _, shapes in architecture.extra_shapes() for name, shape in shapes.items()}
    return base() | head(tied=is_tied(config)), extras | head(tied=False, value_head=True)


def expected_file_shapes(config: Mapping[str, Any] | None) -> Mapping[str, Shape] | None:
    """The same of the file that `save_pretrained` writes, whose names and packs of experts can be others."""
    architecture = read_architecture(config, FAMILIES) if config is not None else None
    if config is None or architecture is None:
        return None
    return architecture.hub_shapes() | architecture.hub_head_shapes(tied=is_tied(config))
