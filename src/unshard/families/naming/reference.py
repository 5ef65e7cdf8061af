"""Following a reference model: its names, its layout of experts, its files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from unshard.checkpoint import Checkpoint
from unshard.families.naming.checks import compare
from unshard.families.naming.draft import Draft
from unshard.families.naming.ties import find_tied
from unshard.families.rules import Rule, join
from unshard.families.sizes import Sizes
from unshard.tensors import Tensor

_WAYS_OUT = {
    "unknown": "follow another model with --names DIR, or --names hub for the names that save_pretrained writes",
    "missing": "the checkpoint does not hold the whole of this model; --names hub does not ask for it",
    "misshapen": "the checkpoint is not of this model",
}


def follow(draft: Draft, reference: Checkpoint, rules: Sequence[Rule], config: Mapping[str, Any]) -> None:
    """Give a draft that has the names of the hub those of a reference, and its assignment of tensors to files.

    What the reference holds as one tensor is put together, what it holds in parts stays so. A tied head that the
    reference stores is written again from the embedding. Names that only one side has, and shapes that differ, are
    problems.
    """
    expected = {name: tensor.shape for name, tensor in reference.tensors.items()}
    shapes = {name: value.shape for name, value in draft.tensors.items()}
    wanted = frozenset([name for name in expected if shapes.get(name) != expected[name]])
    joined = join(draft.tensors, rules, Sizes(config), wanted)
    draft.problems += joined.problems
    draft.replace(joined.tensors, joined.origins)
    changed = tuple([name for name, value in joined.tensors.items() if value.shape != shapes.get(name)])
    if changed:
        draft.note("tensors were named and packed as in the reference model", changed)
    _repeat_tied_heads(draft, expected, config)
    draft.problems += compare(draft.tensors, expected, f"the reference model {_place(reference)}", ways_out=_WAYS_OUT)
    draft.family = f"the reference model {_place(reference)}"
    draft.layout = {name: path for name, tensor in reference.tensors.items() if (path := _file_of(tensor))}


def _repeat_tied_heads(draft: Draft, wanted: Collection[str], config: Mapping[str, Any]) -> None:
    for head, embedding in find_tied(draft.tensors, config).items():
        if head in wanted:
            draft.tensors[head] = draft.tensors[embedding].rename(head)
            draft.origins[head] = draft.origins[embedding]
            draft.dropped = {name: why for name, why in draft.dropped.items() if not name.endswith(head)}
            draft.note(f"{head} repeats {embedding}, as the reference model has it", (head,))


def _place(reference: Checkpoint) -> str:
    return str(next(iter(reference.roots.values()), reference.title))


def _file_of(tensor: Tensor) -> str | None:
    """The file that holds a tensor, from the reference's root; None for one without elements."""
    return tensor.chunks[0].extent.file.path if tensor.chunks else None
