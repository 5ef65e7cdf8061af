"""From another framework's dialect to the names of transformers, with whatever config there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unshard import families
from unshard.checkpoint import Checkpoint, Note
from unshard.errors import ModelError, config_hint, raise_all
from unshard.formats.huggingface.assets import is_tokenizer_file
from unshard.mapping import read_map
from unshard.model_config import class_name
from unshard.opening import told_facts
from unshard.options import MergeOptions
from unshard.words import items_in_lines

if TYPE_CHECKING:
    from unshard.families.translation import Translation


def translate(
    checkpoint: Checkpoint, options: MergeOptions, source: str = "SRC"
) -> tuple[Checkpoint, Translation | None]:
    """The checkpoint under the names of transformers, and what became of it; None where nothing had to be translated.

    source: the checkpoint as it was typed, for hints.

    Raises all that is wrong. Stored names stay where the user wants them.
    """
    if checkpoint.dialect == "huggingface" or options.weights_only or options.names == "stored":
        return checkpoint, None
    if checkpoint.config is None:
        checkpoint = derive_config(checkpoint, options, source)
    assert checkpoint.config is not None
    rules = read_map(options.map, checkpoint.dialect).rules if options.map else ()
    translation = families.translate(checkpoint, _add_heads(checkpoint.config, options), rules)
    raise_all(translation.problems)
    notes = (*checkpoint.notes, *translation.notes)
    return replace(checkpoint, tensors=translation.tensors, notes=notes, dialect="huggingface"), translation


def _add_heads(config: Mapping[str, Any], options: MergeOptions) -> Mapping[str, Any]:
    """The config with the numbers of heads that the user said and it does not have."""
    said = {"num_attention_heads": options.attention_heads, "num_key_value_heads": options.key_value_heads}
    return {**{key: heads for key, heads in said.items() if heads is not None}, **config}


def derive_config(checkpoint: Checkpoint, options: MergeOptions, source: str) -> Checkpoint:
    """The checkpoint with a config.json made of what training recorded, or the user said in its stead.

    Raises ModelError where that does not do: torchtitan records nothing that would.
    """
    if checkpoint.dialect == "torchtitan":
        raise ModelError(
            "there is no config.json, and torchtitan records nothing of the architecture: neither names nor the order "
            "of rows can be known",
            hint=config_hint(source, "torchtitan's"),
        )
    derived = families.derive_config({**told_facts(options), **checkpoint.facts}, checkpoint.tensors)
    if derived.config is None:
        raise ModelError(
            "there is no config.json, and none can be derived, for nothing tells:\n" + items_in_lines(derived.missing),
            hint=config_hint(source, "Megatron's"),
        )
    notes = [
        Note(f"there was no config.json: one for {class_name(derived.config)} was derived from training's arguments")
    ]
    notes += [Note(f"config.json: {assumption}", level="warning") for assumption in derived.assumptions]
    if not any(is_tokenizer_file(asset.path) for asset in checkpoint.assets):
        notes.append(Note("no tokenizer lies beside the checkpoint: give one with --tokenizer DIR", level="warning"))
    return replace(checkpoint, config=derived.config, notes=(*checkpoint.notes, *notes))
