"""The steps from the names of a running, wrapped model to those of the file that `save_pretrained` writes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from unshard.checkpoint import Checkpoint, Shape
from unshard.errors import ModelError, UsageError
from unshard.families.architecture import Architecture, read_architecture
from unshard.families.naming.buffers import drop_recomputed, find_own
from unshard.families.naming.checks import check_vocabulary, compare
from unshard.families.naming.draft import Draft
from unshard.families.naming.filling import fill, tell_excluded
from unshard.families.naming.heads import has_value_head, settle_head
from unshard.families.naming.reference import follow
from unshard.families.naming.ties import settle_ties
from unshard.families.naming.wrappers import unwrap
from unshard.families.rules import Rewritten, split
from unshard.families.sizes import Sizes
from unshard.families.template import HEADS, Family, Parameter
from unshard.families.transformers5 import rules_for
from unshard.model import Base
from unshard.model_config import class_name
from unshard.options import MergeOptions

_WAYS_OUT = {
    "unknown": "--names stored writes all tensors under their stored names; --weights-only does without a config too",
    "missing": "is this the whole checkpoint, and does this config.json belong to it? see --config DIR\nwhat was "
    "frozen and not saved comes from the base model: {}",
    "misshapen": "does this config.json belong to these weights? give the right one with --config DIR",
}


class Namer:
    """One run over a draft.

    `family` describes the model type, if any does; `base` are the shapes of its base model in the file, None where the
    config does not tell them (which is a problem then) or nothing describes the type. `in_file`: the names are those of
    the file already. `own`: names that the user gave himself. `fill_hint`: the command that takes what is not there
    from a base model.
    """

    def __init__(
        self,
        draft: Draft,
        config: Mapping[str, Any],
        options: MergeOptions,
        families: Mapping[str, Family],
        *,
        in_file: bool,
        own: Collection[str],
        fill_hint: str,
    ) -> None:
        self.own = own
        self.fill_hint = fill_hint
        self.in_file = in_file
        self.draft = draft
        self.config = config
        self.options = options
        self.given = {
            "num_attention_heads": options.attention_heads,
            "num_key_value_heads": options.key_value_heads,
        }
        self.families = families
        self.family = families.get(str(config.get("model_type")))
        self.rules = self.family.rules if self.family else rules_for(config)
        self.base: dict[str, Shape] | None = None
        self.known: frozenset[str] | None = None
        self._read_base()

    def run(self, reference: Checkpoint | None, excluded: Mapping[str, Shape], base: Base | None) -> None:
        """All steps. `excluded` was left out when the checkpoint was saved; `base` gives what it can."""
        draft = self.draft
        draft.expect(excluded)
        self._check_head_counts()
        unwrap(draft, self.known)
        ending = settle_head(draft, self.config, required=self.options.value_model)
        changes = {key: value for key, value in draft.config_changes.items() if value is not None}
        architecture = read_architecture({**self.config, **changes}, self.families, ending, self.given)
        rewritten = self._rename(architecture)
        left_out = draft.take_out(excluded)
        drop_recomputed(draft, frozenset(reference.tensors) if reference else frozenset())
        tied = False
        if architecture is None or architecture.is_language_model:
            offered = base.tensors if base else ()
            tied = settle_ties(draft, self.config, self.options.tie_embeddings, self.base or (), offered)
        expected = self._expect(architecture, tied=tied)
        explained = rewritten.explained | self._fill(architecture, expected, left_out, base)
        if reference is not None:
            follow(draft, reference, self.rules, self.config)
        elif architecture is None:
            self._say_unchecked()
        elif expected is not None:
            self._check(architecture, expected, explained)

    def _expect(self, architecture: Architecture | None, *, tied: bool) -> dict[str, Shape] | None:
        """The parameters that the file must have; None where nothing tells them."""
        if architecture is None or self.base is None:
            return None
        try:
            return self.base | architecture.hub_head_shapes(tied=tied, value_head=has_value_head(self.draft))
        except ModelError as problem:
            self.draft.problems.append(problem)
            return None

    def _fill(
        self,
        architecture: Architecture | None,
        expected: Mapping[str, Shape] | None,
        left_out: Mapping[str, Shape],
        base: Base | None,
    ) -> set[str]:
        """Take what is not there from `base`, or say what was left out. Returns the names whose absence is told."""
        if base is not None and (architecture is None or expected is not None):
            name = architecture.name if architecture else class_name(self.config) or "the model"
            return fill(self.draft, base, expected, left_out, name, self.config)
        if left_out:
            self.draft.problems.append(tell_excluded(left_out, f"give a base model that has them: {self.fill_hint}"))
        return set(left_out)

    def _expect_extras(self, architecture: Architecture, expected: dict[str, Shape]) -> None:
        """Of what a file may hold besides, what is there in part must be there whole."""
        for extra, shapes in architecture.extra_shapes():
            if any(name in self.draft.tensors for name in shapes):
                expected |= shapes
            elif extra.absence is not None:
                self.draft.note(extra.absence, tuple(shapes), level="warning")

    def _read_base(self) -> None:
        if self.family is None:
            return
        architecture = read_architecture(self.config, self.families, self.family.heads[0], self.given)
        assert architecture is not None
        try:
            self.base = architecture.hub_shapes()
            running = architecture.base_shapes()
            extras = [shapes for _, shapes in architecture.extra_shapes()]
        except ModelError as problem:
            self.draft.problems.append(problem)
            return
        heads = [part.name for head in HEADS.values() for part in head if isinstance(part, Parameter)]
        self.known = frozenset().union(self.base, running, heads, *extras)

    def _check_head_counts(self) -> None:
        """Head counts that were given must agree with config.json; where it lacks them, they are written into it."""
        sizes = Sizes(self.config)
        for key, said in self.given.items():
            stored = sizes.stored(key)
            if said is None or stored == said:
                continue
            flag = "--" + key.replace("_", "-")
            if stored is None:
                nested = "text_config." if isinstance(self.config.get("text_config"), dict) else ""
                self.draft.config_changes[nested + key] = said
                self.draft.note(f"config.json does not tell {key}: {said} was written there, as {flag} says")
            else:
                message = f"{flag} {said} contradicts config.json, which says {key} {stored}"
                self.draft.problems.append(UsageError(message, hint=f"leave {flag} out"))

    def _rename(self, architecture: Architecture | None) -> Rewritten:
        sizes = architecture.sizes if architecture else Sizes(self.config, given=self.given)
        rewritten = split(self.draft.tensors, () if self.in_file else self.rules, sizes)
        changed = tuple([name for name, origins in rewritten.origins.items() if origins != (name,)])
        if changed:
            self.draft.note("names of the running model became those of the file that save_pretrained writes", changed)
        self.draft.problems += rewritten.problems
        self.draft.replace(rewritten.tensors, rewritten.origins)
        return rewritten

    def _say_unchecked(self) -> None:
        model = class_name(self.config) or self.config.get("model_type") or "this model"
        text = f"no family describes {model}: names and shapes were not checked against an architecture"
        self.draft.note(text, level="warning")

    def _check(self, architecture: Architecture, expected: dict[str, Shape], explained: Collection[str]) -> None:
        draft = self.draft
        try:
            self._expect_extras(architecture, expected)
        except ModelError as problem:
            draft.problems.append(problem)
            return
        draft.family = architecture.name
        draft.uncast = frozenset([name for name in draft.tensors if name.endswith(architecture.family.fp32)])
        vocabulary = check_vocabulary(draft.tensors, expected, architecture.sizes.known("vocab_size"))
        if vocabulary is not None:
            draft.problems.append(vocabulary)
        given = [name for name in self.own if name in draft.tensors and name not in expected]
        own = tuple(dict.fromkeys((*find_own(draft, self.known or ()), *sorted(given))))
        if own:
            text = f"tensors that are no parameters of {architecture.name} are written all the same"
            draft.note(text, own, level="warning")
        ways_out = {**_WAYS_OUT, "missing": _WAYS_OUT["missing"].format(self.fill_hint)}
        if expected.keys() - draft.tensors.keys() == {"lm_head.weight"}:
            ways_out["missing"] = "if lm_head is the embedding, say so with --tie-word-embedding"
        parameters = {name: value for name, value in draft.tensors.items() if name not in own}
        draft.problems += compare(parameters, expected, architecture.name, explained=explained, ways_out=ways_out)
