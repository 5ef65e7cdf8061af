"""From stored names to the names of the model that comes out, step by step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from unshard.checkpoint import Checkpoint, Shape
from unshard.errors import ModelError, UsageError, config_hint, merge_command
from unshard.families.naming.draft import Draft
from unshard.families.naming.namer import Namer
from unshard.families.naming.ties import settle_ties
from unshard.families.template import Family
from unshard.model import Base, Model
from unshard.options import MergeOptions
from unshard.tensors import Value
from unshard.words import count_in_words


def name_tensors(
    tensors: Mapping[str, Value],
    config: Mapping[str, Any] | None,
    options: MergeOptions,
    reference: Checkpoint | None,
    families: Mapping[str, Family],
    *,
    in_file: bool,
    own: Collection[str],
    source: str,
    excluded: Mapping[str, Shape],
    base: Base | None,
) -> Model:
    """See `families.name_model`."""
    draft = Draft.of(tensors)
    left_out = {name: shape for name, shape in excluded.items() if name not in tensors}
    if config is None and reference is not None:
        config = reference.config
    if options.weights_only:
        draft.note("stored names were kept as they are; nothing was tied, renamed or checked against an architecture")
        _say_excluded(draft, left_out)
    elif options.names == "stored":
        if config is not None and options.tie_embeddings is not None:
            settle_ties(draft, config, options.tie_embeddings, ())
        draft.note("stored names were kept as they are and not checked against an architecture")
        _say_excluded(draft, left_out)
    elif config is None:
        draft.problems.append(
            ModelError(
                "there is no config.json, so names, shapes and tied weights cannot be known",
                hint=config_hint(source),
            )
        )
    elif options.names != "hub" and reference is None:
        draft.problems.append(UsageError(f"no reference model was found at {options.names}"))
    else:
        hint = merge_command(source, "--fill-from", "DIR")
        namer = Namer(draft, config, options, families, in_file=in_file, own=own, fill_hint=hint)
        namer.run(reference, left_out, base)
    return draft.finish()


def _say_excluded(draft: Draft, left_out: Mapping[str, Shape]) -> None:
    if left_out:
        parameters = count_in_words(len(left_out), "parameter")
        text = f"the checkpoint was saved without {parameters}, and so are these weights"
        draft.note(text, tuple(left_out), level="warning")
