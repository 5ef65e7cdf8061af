"""The ranks' parts put together: one tensor per name, and everything in which the ranks do not agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from unshard.errors import IncompleteError, UnshardError
from unshard.formats.fsdp.entries import Part, RankReader
from unshard.formats.state_dict import is_tensor, what_it_is
from unshard.tensors import Chunk, Tensor
from unshard.words import items_in_words, ranks_in_words

_NAMED_PROBLEMS = 20
_PLAIN = "plain tensors are replicas and never concatenated; pieces must be saved as DTensor or ShardedTensor"


@dataclass(slots=True)
class _Entry:
    """What the ranks read so far say of one tensor. `seen` are the ranks that have it."""

    first: Part
    first_rank: int
    chunks: list[Chunk]
    seen: set[int]


@dataclass(slots=True)
class Gatherer:
    """Takes the ranks' state dicts one after the other; keeps chunks, and none of the records they were read from."""

    entries: dict[str, _Entry] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    empty_ranks: set[int] = field(default_factory=set)
    read_ranks: set[int] = field(default_factory=set)
    meshes: Counter[tuple[tuple[str, int], ...]] = field(default_factory=Counter)
    reordered: list[str] = field(default_factory=list)
    _problems: list[UnshardError] = field(default_factory=list)
    _unnamed_problems: int = 0
    _disagreeing: set[str] = field(default_factory=set)

    def add(self, reader: RankReader, state_dict: Mapping[str, Any]) -> None:
        """Take one rank's state dict."""
        rank = reader.rank
        self.read_ranks.add(rank)
        if not state_dict:
            self.empty_ranks.add(rank)
        for name, value in state_dict.items():
            if not is_tensor(value):
                self.skipped.setdefault(name, f"no tensor, but {what_it_is(value)}")
                continue
            try:
                self._add_part(name, rank, reader.read(name, value))
            except UnshardError as error:
                self._report(error)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors in the order of the first rank that has any."""
        return {
            name: Tensor(name, entry.first.dtype, entry.first.shape, tuple(entry.chunks))
            for name, entry in self.entries.items()
        }

    def problems(self) -> list[UnshardError]:
        """All that the ranks got wrong: parts that cannot be read, and keys that only some ranks have."""
        found = list(self._problems)
        if self._unnamed_problems:
            found.append(IncompleteError(f"… and {self._unnamed_problems} more problems of the same kinds"))
        return found + self._missing_keys()

    def placements(self) -> dict[str, int]:
        """How many tensors have which placements."""
        return dict(Counter([entry.first.placements or "plain" for entry in self.entries.values()]))

    def kinds(self) -> list[str]:
        """The kinds of tensors that occur, the most frequent first."""
        return [kind for kind, _ in Counter([entry.first.kind for entry in self.entries.values()]).most_common()]

    def incomplete(self) -> list[str]:
        """Tensors whose chunks do not add up to their size.

        The chunks of one tensor are equal or disjoint, because one rule laid them all; so volumes can be added.
        """
        return [
            name
            for name, entry in self.entries.items()
            if sum([box.volume for box in {chunk.box for chunk in entry.chunks}]) != prod(entry.first.shape)
        ]

    def _add_part(self, name: str, rank: int, part: Part) -> None:
        entry = self.entries.get(name)
        if entry is None:
            self.entries[name] = _Entry(part, rank, list(part.chunks), {rank})
            if part.reordered:
                self.reordered.append(name)
        else:
            entry.seen.add(rank)
            if self._agrees(name, entry, rank, part):
                entry.chunks += part.chunks
        if part.mesh is not None:
            self.meshes[part.mesh.dims] += 1

    def _agrees(self, name: str, entry: _Entry, rank: int, part: Part) -> bool:
        """Whether a rank means the same tensor as the first did; reports the first that does not."""
        first = entry.first
        if (first.kind, first.dtype, first.shape) == (part.kind, part.dtype, part.shape):
            return True
        if name in self._disagreeing:
            return False
        self._disagreeing.add(name)
        for what, here, there in (
            ("kind", first.kind, part.kind),
            ("shape", first.shape, part.shape),
            ("dtype", first.dtype, part.dtype),
        ):
            if here != there:
                plain = what == "shape" and first.kind == part.kind == "tensor"
                self._report(
                    IncompleteError(
                        f"{name}: the ranks disagree on its {what}: {here} on rank {entry.first_rank}, "
                        f"{there} on rank {rank}",
                        hint=_PLAIN if plain else "these files do not belong to the same checkpoint",
                    )
                )
        return False

    def _report(self, problem: UnshardError) -> None:
        if len(self._problems) < _NAMED_PROBLEMS:
            self._problems.append(problem)
        else:
            self._unnamed_problems += 1

    def _missing_keys(self) -> list[UnshardError]:
        """One problem per set of ranks that lack keys which others have. Ranks that saved `{}` are not asked."""
        asked = self.read_ranks - self.empty_ranks
        lacking: dict[tuple[int, ...], list[str]] = {}
        for name, entry in self.entries.items():
            if missing := asked - entry.seen:
                lacking.setdefault(tuple(sorted(missing)), []).append(name)
        return [
            IncompleteError(
                f"{ranks_in_words(ranks)} {'have' if len(ranks) > 1 else 'has'} no {items_in_words(names)}, "
                "which other ranks have",
                hint="files of different checkpoints may be mixed here",
            )
            for ranks, names in lacking.items()
        ]
