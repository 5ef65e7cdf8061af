"""From Megatron's names and layouts to those of the Hugging Face file: aliases resolved, then the family's rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unshard.checkpoint import Checkpoint, Note, Shape
from unshard.errors import ModelError, UnshardError
from unshard.families.architecture import Architecture
from unshard.families.megatron.adapters import translate_adapters
from unshard.families.megatron.aliases import resolve_alias
from unshard.families.megatron.contradictions import compare_facts, other_layouts, padding_limit
from unshard.families.megatron.heads import find_value_head
from unshard.families.rules import Rewritten, Rule, split
from unshard.families.sizes import Sizes
from unshard.families.template import Family
from unshard.families.translation import Translation, finish, map_hint, no_rules, sizes_of, unknown_names
from unshard.tensors import Computed, Tensor, Value
from unshard.words import count_in_words

_WHOSE = "Megatron's"


def translate(
    checkpoint: Checkpoint, config: Mapping[str, Any], family: Family | None, rules: Sequence[Rule]
) -> Translation:
    """The tensors of a checkpoint in Megatron's dialect, by `rules` (the user's) and those of the family.

    config: of the model. family: of the config's model type, if any describes it.
    """
    translator = _Translator(checkpoint, config, family, (*rules, *(family.megatron if family else ())))
    translator.run()
    return finish(translator.result, translator.notes, translator.problems)


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
        if not self.rules:
            self.problems.append(no_rules(self.config, _WHOSE))
            return
        sizes = sizes_of(self.config, self.family, self.checkpoint.facts)
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
            self.problems.append(unknown_names(unknown, self.rules, self.config, self.family, _WHOSE))

    def _check_layouts(self) -> None:
        """Refuse layouts that the family's rules do not know; the user's own may."""
        found = other_layouts(self.checkpoint.facts, self.config.get("model_type"))
        own = self.family is None or len(self.rules) > len(self.family.megatron)
        if found and own:
            self.notes.append(Note(f"{found}\nThe rules of --map must account for that", level="warning"))
        elif found:
            self.problems.append(ModelError(found, hint=map_hint(_WHOSE)))

    def _file_shapes(self, sizes: Sizes) -> Mapping[str, Shape]:
        """The shapes of the base model in the file; where only adapters are stored, as the config tells them."""
        if self.result.tensors:
            return {name: value.shape for name, value in self.result.tensors.items()}
        try:
            return Architecture(self.family, self.family.heads[0], sizes).hub_shapes() if self.family else {}
        except ModelError:
            return {}

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
