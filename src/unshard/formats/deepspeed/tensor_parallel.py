"""The parameters of all tensor-parallel ranks joined to whole ones.

DeepSpeed does not know how `mp_rank` files belong together: whoever trained does. Three ways tell it, in this order:
the user's own table (`[axes]` of `--map`), the names of Megatron-LM, `universal_checkpoint_info` (`declared.py`).
Nothing is guessed: a parameter of which none of them speaks is an error.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unshard.errors import FormatError, IncompleteError, UnshardError
from unshard.formats.deepspeed.declared import Declaration
from unshard.formats.megatron.ranks.joining import Joiner, Shard
from unshard.formats.megatron.ranks.pre_core import to_core
from unshard.formats.megatron.ranks.tensor_parallel import Neighbours
from unshard.formats.megatron.sections import join_along, join_replicas
from unshard.tensors import Tensor
from unshard.words import items_in_lines, names_in_words, ranks_in_words

_LISTED = 20
_EMBEDDING = "embedding.word_embeddings.weight"
_BY_HAND = "say how they lie in the table `[axes]` of a file, and give that with --map FILE"
_ONE_RUN = "files of different checkpoints may be mixed here"


@dataclass(slots=True)
class Joined:
    """Whole tensors; cuts: how often each kind of cut occurred, in words; problems: everything that is wrong."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    cuts: Counter[str] = field(default_factory=Counter)
    problems: list[UnshardError] = field(default_factory=list)


def join_ranks(
    parts: Sequence[Mapping[str, Tensor]],
    info: object,
    *,
    axes: Mapping[str, int | None],
    buffers: Collection[str] = (),
) -> Joined:
    """The tensors of a model whose names are not Megatron's.

    parts:   what each tensor-parallel rank holds, in their order.
    info:    `universal_checkpoint_info`, None where nothing is declared.
    axes:    the user's own table, asked first.
    buffers: names of buffers, which each rank has.
    """
    joined = Joined()
    if len(parts) == 1:
        joined.tensors = dict(parts[0])
        return joined
    declared = _read_declaration(info, buffers, joined.problems)
    own = {re.compile(pattern): axis for pattern, axis in axes.items()}
    unknown: list[str] = []
    wrong: list[str] = []
    names = dict.fromkeys([name for part in parts for name in part])
    lacking: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        absent = tuple([rank for rank, part in enumerate(parts) if name not in part])
        if absent:
            lacking.setdefault(absent, []).append(name)
            continue
        shards = [part[name] for part in parts]
        try:
            by_hand = next((pattern for pattern in own if pattern.fullmatch(name)), None)
            if by_hand is not None:
                words, tensor = _join_by_hand(own[by_hand], shards)
            elif declared is not None:
                words, tensor = declared.join(name, shards)
            else:
                unknown.append(f"{name} {[list(shard.shape) for shard in shards]}")
                continue
        except ValueError as error:
            wrong.append(str(error))
            continue
        joined.cuts[words] += 1
        joined.tensors[name] = tensor.rename(name)
    if info is None or declared is not None:
        joined.problems += _problems(len(parts), unknown, wrong, lacking)
    return joined


def _join_by_hand(axis: int | None, shards: Sequence[Tensor]) -> tuple[str, Tensor]:
    if axis is None:
        return "replicated", join_replicas(shards)
    return f"axis {axis}", join_along(shards, axis)


def _read_declaration(info: object, buffers: Collection[str], problems: list[UnshardError]) -> Declaration | None:
    if info is None:
        return None
    try:
        if not isinstance(info, Mapping):
            raise FormatError(f"universal_checkpoint_info is a {type(info).__name__}, not a dict")
        return Declaration(info, buffers)
    except FormatError as error:
        problems.append(error)
        return None


def _problems(
    ranks: int, unknown: Sequence[str], wrong: Sequence[str], lacking: Mapping[tuple[int, ...], Sequence[str]]
) -> list[UnshardError]:
    found: list[UnshardError] = []
    if unknown:
        found.append(
            IncompleteError(
                f"how do {ranks} model-parallel ranks share these? The checkpoint has no universal_checkpoint_info, "
                f"and the names are not Megatron's:\n{items_in_lines(unknown, _LISTED)}",
                hint=_BY_HAND,
            )
        )
    if wrong:
        found.append(
            IncompleteError(f"shards cannot be put together:\n{items_in_lines(wrong, _LISTED)}", hint=_BY_HAND)
        )
    for absent, names in lacking.items():
        have = "have" if len(absent) > 1 else "has"
        found.append(
            IncompleteError(
                f"model-parallel {ranks_in_words(absent)} {have} no {names_in_words(names)}, which others have",
                hint=_ONE_RUN,
            )
        )
    return found


def join_megatron_ranks(
    parts: Sequence[Mapping[str, Tensor]], version: float, facts: Mapping[str, Any], axes: Mapping[str, int | None]
) -> Joined:
    """The tensors of a model of Megatron-DeepSpeed as the canonical catalog has them (docs/formats/megatron.md).

    parts:   what each tensor-parallel rank holds under the names of Megatron-LM from before megatron-core, layers
             numbered over the whole model.
    version: `checkpoint_version`; facts: what training recorded.
    """
    joined = Joined()
    ranks = len(parts)
    try:
        core = [to_core(part, version, facts, ranks) for part in parts]
    except FormatError as error:
        joined.problems.append(error)
        return joined
    joiner = Joiner(ranks, ranks, axes)
    shapes = {name: tensor.shape for part in reversed(core) for name, tensor in part.items()}
    rows = [shape[0] for name, shape in shapes.items() if name.endswith(_EMBEDDING) and shape]
    near = Neighbours(shapes, facts, rows[0] if rows else None)
    for name in dict.fromkeys([name for part in core for name in part]):
        shards = [Shard(rank, f"tensor rank {rank}", part[name]) for rank, part in enumerate(core) if name in part]
        whole = joiner.join(name, shards, near)
        if whole is not None:
            joined.tensors[name] = whole
    joined.cuts = joiner.cuts
    joined.problems += joiner.problems(all_there=True)
    return joined
