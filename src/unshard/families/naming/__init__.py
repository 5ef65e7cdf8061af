"""From stored names to the names of the model that comes out, step by step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from unshard.checkpoint import Checkpoint
from unshard.errors import ModelError, UsageError
from unshard.families.naming.draft import Draft
from unshard.families.naming.namer import Namer
from unshard.families.naming.ties import settle_ties
from unshard.families.template import Family
from unshard.model import Model
from unshard.options import MergeOptions
from unshard.tensors import Value


def name_tensors(
    tensors: Mapping[str, Value],
    config: Mapping[str, Any] | None,
    options: MergeOptions,
    reference: Checkpoint | None,
    families: Mapping[str, Family],
    *,
    in_file: bool,
    own: Collection[str],
) -> Model:
    """See `families.name_model`."""
    draft = Draft.of(tensors)
    if config is None and reference is not None:
        config = reference.config
    if options.weights_only:
        draft.note("stored names were kept as they are; nothing was tied, renamed or checked against an architecture")
    elif options.names == "stored":
        if config is not None and options.tie_embeddings is not None:
            settle_ties(draft, config, options.tie_embeddings, ())
        draft.note("stored names were kept as they are and not checked against an architecture")
    elif config is None:
        draft.problems.append(
            ModelError(
                "there is no config.json, so names, shapes and tied weights cannot be known",
                hint="give the model's own with --config DIR, or write the stored names with --weights-only",
            )
        )
    elif options.names != "hub" and reference is None:
        draft.problems.append(UsageError(f"no reference model was found at {options.names}"))
    else:
        Namer(draft, config, options, families, in_file=in_file, own=own).run(reference)
    return draft.finish()
