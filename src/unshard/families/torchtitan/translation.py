"""From the names and layouts of torchtitan's models to those of the Hugging Face file, by the family's rules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unshard.checkpoint import Checkpoint, Note
from unshard.errors import ModelError, UnshardError
from unshard.families.rules import Rewritten, Rule, find_rule, split
from unshard.families.sizes import Sizes
from unshard.families.steps import OnPart, Permute
from unshard.families.template import Family
from unshard.families.torchtitan.buffers import compare_angles, leave_out
from unshard.families.translation import Translation, finish, no_rules, sizes_of, unknown_names
from unshard.tensors import Tensor
from unshard.words import count_in_words, names_in_words

_WHOSE = "torchtitan's"
_ADAPTER = re.compile(r".+\.lora_[ab]\..+")
_FURTHER = re.compile(r"mtp_layers\.([0-9]{1,9})\.(.+)")


def translate(
    checkpoint: Checkpoint, config: Mapping[str, Any], family: Family | None, rules: Sequence[Rule]
) -> Translation:
    """The tensors of a checkpoint in torchtitan's dialect, by `rules` (the user's) and those of the family.

    config: of the model. family: of the config's model type, if any describes it.
    """
    rules = (*rules, *(family.torchtitan if family else ()))
    if not rules:
        return Translation(problems=(no_rules(config, _WHOSE),))
    sizes = sizes_of(config, family, checkpoint.facts)
    problems = [*_refuse_adapters(checkpoint.tensors), *_contradictions(checkpoint.tensors, rules, sizes)]
    if problems:
        return Translation(problems=tuple(problems))
    layers = sizes.known("num_hidden_layers") if family and family.mtp_follows else None
    numbered = _number_further(checkpoint.tensors, layers)
    parameters, notes = leave_out(numbered.tensors, rules)
    result = split(parameters, rules, sizes)
    problems += [*numbered.problems, *result.problems]
    if result.unknown:
        problems.append(unknown_names(result.unknown, rules, config, family, _WHOSE))
    if turned := [name for name in parameters if _is_turned(name, rules)]:
        notes.append(_rotation_note(turned, sizes))
    return finish(result, notes, problems)


def _refuse_adapters(tensors: Mapping[str, Tensor]) -> Iterator[UnshardError]:
    """No alpha is stored with adapters (`components/lora.py`): what they scale to is not known."""
    if found := [name for name in tensors if _ADAPTER.fullmatch(name)]:
        yield ModelError(
            f"adapters of torchtitan's LoRA are not translated ({count_in_words(len(found), 'tensor')}: "
            f"{names_in_words(found)}): the checkpoint does not tell their alpha",
            hint="write them under torchtitan's own names with --names stored",
        )


def _contradictions(tensors: Mapping[str, Tensor], rules: Sequence[Rule], sizes: Sizes) -> Iterator[UnshardError]:
    """What config.json says of rotary positions, and torchtitan does otherwise, in shapes that do not tell."""
    if sizes.has("kv_lora_rank") and sizes.stored("rope_interleave") is False:
        yield ModelError(
            "config.json says rope_interleave false, but torchtitan turns neighbouring dimensions of latent attention",
            hint="give the config.json of the model that was trained with --config DIR",
        )
    if any(_turns(rule) for rule in rules) and (contradiction := compare_angles(tensors, sizes)):
        yield contradiction


def _number_further(tensors: Mapping[str, Tensor], layers: int | None) -> Rewritten:
    """The tensors, with layers that predict further tokens numbered behind the `layers` others, as in the file."""
    numbered = Rewritten()
    for name, tensor in tensors.items():
        match = _FURTHER.fullmatch(name)
        if match is not None and layers is not None:
            numbered.add(f"layers.{layers + int(match[1])}.{match[2]}", tensor, (name,))
        else:
            numbered.add(name, tensor, (name,))
    return numbered


def _is_turned(name: str, rules: Sequence[Rule]) -> bool:
    found = find_rule(name, rules)
    return found is not None and _turns(found[0])


def _turns(rule: Rule) -> bool:
    """Whether a rule puts rows into another order."""
    return any(isinstance(step.step if isinstance(step, OnPart) else step, Permute) for step in rule.steps)


def _rotation_note(names: Sequence[str], sizes: Sizes) -> Note:
    """Heads are told by the config alone: a person should see which."""
    heads, keys, width = (sizes.known(key) for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    text = (
        "rows of queries and keys were put from neighbouring rotary pairs into halves of heads, for "
        f"{heads} heads ({keys} of keys) of {width} rows, as config.json says"
    )
    return Note(text, tuple(names))
