"""The parameters of all tensor-parallel ranks joined to whole ones.

DeepSpeed does not know how `mp_rank` files belong together: whoever trained does. Three ways tell it, in this order:
the user's own table (`[axes]` of `--map`), the names of Megatron-LM, `universal_checkpoint_info` (`declared.py`).
Nothing is guessed: a parameter of which none of them speaks is an error.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unshard.errors import FormatError, IncompleteError, UnshardError
from unshard.formats.deepspeed.declared import Declaration, read_declaration
from unshard.formats.megatron.ranks.joining import Joiner, Shard
from unshard.formats.megatron.ranks.pre_core import to_core
from unshard.formats.megatron.ranks.tensor_parallel import Neighbours
from unshard.formats.megatron.sections import join_along, join_replicas
from unshard.tensors import Tensor
from unshard.words import items_in_lines, names_in_words, ranks_in_words

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
    if len(parts) == 1:
        return Joined(dict(parts[0]))
    joining = _Joining(len(parts), {re.compile(pattern): axis for pattern, axis in axes.items()})
    if info is not None:
        try:
            joining.declared = read_declaration(info, buffers)
        except FormatError as error:
            return Joined(problems=[error])
    for name in dict.fromkeys([name for part in parts for name in part]):
        joining.join(name, [part.get(name) for part in parts])
    return Joined(joining.tensors, joining.cuts, list(joining.problems()))


@dataclass(slots=True)
class _Joining:
    """Joins parameters one by one, and collects what is wrong with them.

    own: the user's table. unknown, wrong: lines for people. lacking: ranks → the parameters that they do not have.
    """

    ranks: int
    own: Mapping[re.Pattern[str], int | None]
    declared: Declaration | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    cuts: Counter[str] = field(default_factory=Counter)
    unknown: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    lacking: dict[tuple[int, ...], list[str]] = field(default_factory=lambda: defaultdict(list))

    def join(self, name: str, held: Sequence[Tensor | None]) -> None:
        """`held` is what each rank has."""
        shards = [shard for shard in held if shard is not None]
        if len(shards) < self.ranks:
            self.lacking[tuple([rank for rank, shard in enumerate(held) if shard is None])].append(name)
            return
        try:
            found = self._join(name, shards)
        except ValueError as error:
            self.wrong.append(str(error))
            return
        if found is None:
            self.unknown.append(f"{name} {[list(shard.shape) for shard in shards]}")
            return
        words, tensor = found
        self.cuts[words] += 1
        self.tensors[name] = tensor.rename(name)

    def _join(self, name: str, shards: Sequence[Tensor]) -> tuple[str, Tensor] | None:
        """In words how the shards lie, and the whole; None where nothing tells. Raises ValueError."""
        for pattern, axis in self.own.items():
            if pattern.fullmatch(name):
                return (
                    ("replicated", join_replicas(shards))
                    if axis is None
                    else (f"axis {axis}", join_along(shards, axis))
                )
        return self.declared.join(name, shards) if self.declared is not None else None

    def problems(self) -> Iterator[UnshardError]:
        """One problem for each kind of fault."""
        if self.unknown:
            yield IncompleteError(
                f"how do {self.ranks} model-parallel ranks share these? The checkpoint has no "
                "universal_checkpoint_info, and the names are not Megatron's:\n" + items_in_lines(self.unknown),
                hint=_BY_HAND,
            )
        if self.wrong:
            yield IncompleteError(f"shards cannot be put together:\n{items_in_lines(self.wrong)}", hint=_BY_HAND)
        for absent, names in self.lacking.items():
            have = "have" if len(absent) > 1 else "has"
            yield IncompleteError(
                f"model-parallel {ranks_in_words(absent)} {have} no {names_in_words(names)}, which others have",
                hint=_ONE_RUN,
            )


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
