"""The ranks' shards joined to full tensors, and everything in which the ranks do not agree."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from unshard.checkpoint import Shape
from unshard.errors import IncompleteError, UnshardError
from unshard.formats.megatron.ranks.local_experts import is_expert
from unshard.formats.megatron.ranks.tensor_parallel import REPLICATED, Cut, Neighbours, cut_of
from unshard.formats.megatron.sections import join_along, join_replicas, join_sections
from unshard.tensors import Tensor
from unshard.words import items_in_lines, names_in_words, ranks_in_words

_LISTED = 20
_ONE_RUN = "files of different checkpoints may be mixed here"


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds of a tensor. `rank` counts among those that share the tensor; `place` is its directory."""

    rank: int
    place: str
    tensor: Tensor


@dataclass(slots=True)
class Joiner:
    """Joins shards, tensor by tensor.

    ranks, expert_ranks: how many ranks share a dense tensor, and one expert.
    axes:     the user's own table, asked before ours.
    cuts:     how often each kind of cut occurred, in words.
    lacking:  names by how many ranks should have them, and which ranks do.
    """

    ranks: int
    expert_ranks: int
    axes: Mapping[str, int | None] = field(default_factory=dict)
    cuts: Counter[str] = field(default_factory=Counter)
    unknown: dict[str, Shape] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    lacking: dict[tuple[int, tuple[int, ...]], list[str]] = field(default_factory=lambda: defaultdict(list))

    def join(self, name: str, shards: Sequence[Shard], near: Neighbours) -> Tensor | None:
        """The full tensor of shards that bear one name on one stage; None where it cannot be told.

        near: what lies beside the first shard.
        """
        ranks = self.expert_ranks if is_expert(name) else self.ranks
        cut = REPLICATED if ranks == 1 else self._cut_of(name, shards[0].tensor.shape, near)
        if cut is None:
            self.unknown[name] = shards[0].tensor.shape
            return None
        if not self._agree(name, shards):
            return None
        groups: dict[int, list[Tensor]] = defaultdict(list)
        for shard in shards:
            groups[shard.rank].append(shard.tensor)
        if len(groups) < ranks:
            self.lacking[ranks, tuple(sorted(groups))].append(name)
        words = "whole" if ranks == 1 else str(cut)
        self.cuts[f"experts {words}" if is_expert(name) else words] += 1
        try:
            if cut.axis is None:
                return join_replicas([shard.tensor for shard in shards]).rename(name)
            parts, counts = _side_by_side(groups, ranks, cut.axis)
            if cut.sections:
                return join_sections(parts, cut.axis, cut.sections, counts).rename(name)
            return join_along(parts, cut.axis).rename(name)
        except ValueError as error:
            self.wrong.append(str(error))
            return None

    def problems(self, *, all_there: bool) -> list[UnshardError]:
        """All that went wrong: names that no table knows, shapes that differ, and, where the directories of all ranks
        are there, shards that are not.
        """
        found: list[UnshardError] = []
        if self.unknown:
            lines = items_in_lines([f"{name} {list(shape)} per rank" for name, shape in self.unknown.items()], _LISTED)
            found.append(
                IncompleteError(
                    f"how do {self.ranks} tensor-parallel ranks share these? No table knows their names:\n{lines}",
                    hint="say it in the table `[axes]` of a file, and give that with --map FILE",
                )
            )
        if self.wrong:
            found.append(
                IncompleteError(f"shards do not fit together:\n{items_in_lines(self.wrong, _LISTED)}", hint=_ONE_RUN)
            )
        for (ranks, present), names in self.lacking.items() if all_there else ():
            missing = set(range(ranks)) - set(present)
            words = f"tensor-parallel {ranks_in_words(missing)}"
            problem = f"{words} {'have' if len(missing) > 1 else 'has'} no {names_in_words(names)}, which others have"
            found.append(IncompleteError(problem, hint=_ONE_RUN))
        return found

    def _cut_of(self, name: str, shape: Shape, near: Neighbours) -> Cut | None:
        for pattern, axis in self.axes.items():
            if re.fullmatch(pattern, name):
                return Cut(axis)
        return cut_of(name, shape, near)

    def _agree(self, name: str, shards: Sequence[Shard]) -> bool:
        """Whether all shards have one shape and type, as Megatron's even cuts give them; reports where not."""
        kinds: dict[tuple[str, Shape], list[str]] = defaultdict(list)
        for shard in shards:
            kinds[str(shard.tensor.dtype), shard.tensor.shape].append(shard.place)
        if len(kinds) > 1:
            there = "; ".join([f"{dtype} {list(shape)} in {places[0]}" for (dtype, shape), places in kinds.items()])
            self.wrong.append(f"{name}: {there}")
        return len(kinds) == 1


def _side_by_side(groups: Mapping[int, Sequence[Tensor]], ranks: int, axis: int) -> tuple[list[Tensor], list[int]]:
    """The shards of all ranks in their order, and of how many ranks each is.

    Ranks beside each other that have none share one without chunks: args may claim any number of them. Raises
    ValueError where the shards have no such axis.
    """
    one = next(iter(groups.values()))[0]
    if axis >= one.ndim:
        raise ValueError(f"{one.name}: a shard of shape {list(one.shape)} has no axis {axis}")
    parts, counts, first = [], [], 0
    for rank in (*sorted(groups), ranks):
        if absent := rank - first:
            shape = (*one.shape[:axis], one.shape[axis] * absent, *one.shape[axis + 1 :])
            parts.append(replace(one, shape=shape, chunks=()))
            counts.append(absent)
        if rank < ranks:
            parts.append(join_replicas(groups[rank]))
            counts.append(1)
        first = rank + 1
    return parts, counts
