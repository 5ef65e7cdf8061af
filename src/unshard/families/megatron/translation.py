"""From Megatron's names and layouts to those of the Hugging Face file: aliases resolved, then the family's rules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unshard.checkpoint import Checkpoint, Note, Shape
from unshard.errors import ModelError, UnshardError
from unshard.families.architecture import Architecture, count_labels
from unshard.families.megatron.adapters import translate_adapters
from unshard.families.megatron.aliases import resolve_alias
from unshard.families.megatron.contradictions import compare_facts, other_layouts, padding_limit
from unshard.families.megatron.heads import find_value_head
from unshard.families.naming.lists import nearest, summarize
from unshard.families.rules import Rewritten, Rule, split
from unshard.families.sizes import Sizes
from unshard.families.template import Family
from unshard.tensors import Computed, Tensor, Value
from unshard.words import count_in_words, items_in_lines

_WILDCARD = re.compile(r"\{[a-z_]+\}")
_MAP_HINT = "add the rules that are missing with --map FILE, or write Megatron's own names with --names stored"


@dataclass(frozen=True, slots=True)
class Translation:
    """A checkpoint's tensors under the names of the Hugging Face file, adapters as PEFT names them.

    computed: the values that are no plain bytes of the checkpoint: shifted norms.
    own:      names that the user's own rules gave: they are written, whatever the architecture has.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    computed: Mapping[str, Computed] = field(default_factory=dict)
    own: frozenset[str] = frozenset()
    notes: tuple[Note, ...] = ()
    problems: tuple[UnshardError, ...] = ()


def translate(
    checkpoint: Checkpoint, config: Mapping[str, Any], family: Family | None, rules: Sequence[Rule]
) -> Translation:
    """The tensors of a checkpoint in Megatron's dialect, by `rules` (the user's) and those of the family.

    config: of the model. family: of the config's model type, if any describes it.
    """
    translator = _Translator(checkpoint, config, family, (*rules, *(family.megatron if family else ())))
    translator.run()
    values = translator.result.tensors
    return Translation(
        {name: value for name, value in values.items() if isinstance(value, Tensor)},
        {name: value for name, value in values.items() if isinstance(value, Computed)},
        frozenset(translator.result.own),
        tuple(translator.notes),
        tuple(translator.problems),
    )


@dataclass(slots=True)
class _Translator:
    """One translation, step by step."""

    checkpoint: Checkpoint
    config: Mapping[str, Any]
    family: Family | None
    rules: Sequence[Rule]
    result: Rewritten = field(default_factory=Rewritten)
    notes: list[Note] = field(default_factory=list)
    problems: list[UnshardError] = field(default_factory=list)

    def run(self) -> None:
        model_type = self.config.get("model_type")
        if not self.rules:
            message = f"no rules lead from Megatron's names to those of a {model_type!r} model"
            self.problems.append(ModelError(message, hint=_MAP_HINT))
            return
        sizes = self._sizes()
        contradiction = compare_facts(self.checkpoint.facts, sizes)
        if contradiction is not None:
            self.problems.append(contradiction)
            return
        self._check_layouts()
        plain = self._resolve_aliases(sizes)
        base = {name: value for name, value in plain.tensors.items() if ".adapter" not in name}
        self.result = split(base, self.rules, sizes)
        self._note_norms(sizes)
        self._note_padding(base)
        shapes = self._file_shapes(sizes)
        stored = {
            name: value for name, value in plain.tensors.items() if name not in base and isinstance(value, Tensor)
        }
        adapters = translate_adapters(stored, self.rules, sizes, shapes)
        self.result.tensors |= adapters.tensors
        self.notes += adapters.notes
        self.problems += [*plain.problems, *self.result.problems, *adapters.problems]
        unknown = [*self.result.unknown, *adapters.unknown]
        if unknown:
            self.problems.append(self._unknown(unknown))

    def _check_layouts(self) -> None:
        """Refuse layouts that the family's rules do not know; the user's own may."""
        found = other_layouts(self.checkpoint.facts, self.config.get("model_type"))
        own = self.family is None or len(self.rules) > len(self.family.megatron)
        if found and own:
            self.notes.append(Note(f"{found}\nThe rules of --map must account for that", level="warning"))
        elif found:
            self.problems.append(ModelError(found, hint=_MAP_HINT))

    def _file_shapes(self, sizes: Sizes) -> Mapping[str, Shape]:
        """The shapes of the base model in the file; where only adapters are stored, as the config tells them."""
        if self.result.tensors:
            return {name: value.shape for name, value in self.result.tensors.items()}
        try:
            return Architecture(self.family, self.family.heads[0], sizes).hub_shapes() if self.family else {}
        except ModelError:
            return {}

    def _sizes(self) -> Sizes:
        defaults = self.family.all_defaults() if self.family else None
        given = {"num_labels": count_labels(self.config)}
        return Sizes(self.config, defaults, given, self.checkpoint.facts)

    def _resolve_aliases(self, sizes: Sizes) -> Rewritten:
        follows = self.family is not None and self.family.mtp_follows
        layers = sizes.known("num_hidden_layers") if follows else None
        heads = find_value_head(self.checkpoint.tensors)
        plain = Rewritten()
        for name, value in self.checkpoint.tensors.items():
            plain.add(heads.get(name) or resolve_alias(name, layers), value, (name,))
        for stored, name in heads.items():
            if name in plain.tensors:
                self.notes.append(Note(f"{stored} has fewer rows than the embedding: it is the head of a value model"))
        return plain

    def _note_norms(self, sizes: Sizes) -> None:
        """Say which norms were shifted, and what was taken for granted where nothing is recorded."""
        shifted = tuple([name for name, value in self.result.tensors.items() if isinstance(value, Computed)])
        if shifted:
            text = "norms were stored as 1 + weight is used (or not), other than the model does: computed in float32"
            self.notes.append(Note(text, shifted))
        centred = sizes.flag("megatron.apply_layernorm_1p")
        if centred and self.checkpoint.facts.get("apply_layernorm_1p") is None:
            text = "training did not record apply_layernorm_1p: norms are taken to be zero-centred, as this model's are"
            self.notes.append(Note(text, level="warning"))

    def _note_padding(self, base: Mapping[str, Value]) -> None:
        """Say how many rows of the vocabulary were padding, and whether those are more than training adds."""
        limit = padding_limit(self.checkpoint.facts)
        for name, origins in self.result.origins.items():
            stored = base[origins[0]]
            cut = stored.shape[0] - self.result.tensors[name].shape[0] if stored.shape else 0
            if cut > 0 and origins[0].endswith(("word_embeddings.weight", "output_layer.weight")):
                rows = count_in_words(cut, "row")
                text = f"{rows} of padding cut from the vocabulary of {origins[0]}"
                if limit is None or cut < limit:
                    self.notes.append(Note(text, (name,)))
                    continue
                text += f": training adds less than {limit}. Is vocab_size in config.json that of this model?"
                self.notes.append(Note(text, (name,), "warning"))

    def _unknown(self, names: Sequence[str]) -> ModelError:
        """All names that no rule knows, each with the known one that it resembles."""
        known = {_WILDCARD.sub("#", rule.whole): rule.whole for rule in self.rules}
        lines = list(_with_guesses(names, known))
        what = f"{self.config.get('model_type')!r} models" if self.family else "the rules that were given"
        tensors = count_in_words(len(names), "tensor")
        hint = f"does this config.json belong to these weights (--config DIR)? If it does, {_MAP_HINT}"
        return ModelError(f"{tensors} unknown to the rules for {what}:\n{items_in_lines(lines)}", hint=hint)


def _with_guesses(names: Sequence[str], known: Mapping[str, str]) -> Iterator[str]:
    for line, count in summarize(names).items():
        text = line if count == 1 else f"{line} ({count_in_words(count, 'tensor')})"
        guess = nearest(line, known)
        yield f"{text}, close to {guess}" if guess else text
