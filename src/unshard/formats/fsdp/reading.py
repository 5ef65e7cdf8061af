"""Reads all ranks into one catalog, and says everything at once that is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unshard.checkpoint import Checkpoint, Note, Shape
from unshard.errors import FormatError, IncompleteError, UnshardError
from unshard.formats.contract import Source
from unshard.formats.fsdp.entries import RankReader
from unshard.formats.fsdp.flat import FindOrder, Fragments, is_flat_parameter, shapes_unknown, unflatten
from unshard.formats.fsdp.gather import Gatherer
from unshard.formats.fsdp.order import order_by_values
from unshard.formats.fsdp.ranks import RankSet, compare_recorded
from unshard.formats.state_dict import find_state_dict
from unshard.formats.surroundings import look_around
from unshard.formats.torch_file.reader import read_torch_file
from unshard.tensors import Tensor
from unshard.words import items_in_words, ranks_in_words

_PARENTS = {"verl": 0, "accelerate": 2, "ranks": 1, "file": 1}
"""How far above the ranks each layout may keep the model's config."""
_MAX_RANKS = 1 << 16


def read_ranks(source: Source, found: RankSet, stated: Mapping[str, Any], format_name: str) -> Checkpoint:
    """The catalog of the rank files in `found`; `stated` is the content of `fsdp_config.json`, where there is one."""
    return _Reading(source, found, stated, list(found.problems), list(found.notes)).run(format_name)


@dataclass(slots=True)
class _Reading:
    """One reading of a checkpoint: what was found so far, step by step."""

    source: Source
    found: RankSet
    stated: Mapping[str, Any]
    problems: list[UnshardError]
    notes: list[Note]
    gatherer: Gatherer = field(default_factory=Gatherer)
    fragments: Fragments = field(default_factory=Fragments)
    recorded: dict[int, set[int]] = field(default_factory=dict)
    recorded_world: int = 0

    def run(self, format_name: str) -> Checkpoint:
        found = self.found
        around = look_around(found.directories, _PARENTS[found.group.layout])
        self.problems += around.problems
        version = _fsdp_version(self.stated)
        self._read_files(is_fsdp1=version == "1")
        if found.group.layout != "file":
            self.problems += compare_recorded(found, self.recorded)
        self.problems += self.gatherer.problems()
        world_size = self._check_world()
        self._write_notes()
        kinds = self._kinds(version)
        tensors = self._unflatten(self.gatherer.tensors(), around.config, len(found.ranks))
        mesh = self.gatherer.meshes.most_common(1)[0][0] if self.gatherer.meshes else ()
        return Checkpoint(
            format=format_name,
            title=_title(kinds, len(found.ranks), world_size, mesh),
            roots={**self.source.roots, **(around.roots or {})},
            tensors=tensors,
            config=around.config,
            assets=around.assets,
            world_size=world_size,
            mesh=mesh,
            placements=self.gatherer.placements(),
            adapter=around.adapter,
            skipped=self.gatherer.skipped,
            notes=tuple(self.notes),
            problems=tuple(self.problems),
        )

    def _read_files(self, *, is_fsdp1: bool) -> None:
        """Read every rank's file, one after the other, keeping only what the gatherer takes from it."""
        for rank, rank_file in sorted(self.found.ranks.items()):
            reader = RankReader(rank, self.source.roots, is_fsdp1)
            try:
                content = read_torch_file(rank_file.path, rank_file.file)
                state_dict, left_out = find_state_dict(content.root, str(rank_file.path))
            except FormatError as error:
                self.problems.append(error)
                continue
            self.gatherer.skipped |= left_out
            self.gatherer.add(reader, self.fragments.take(state_dict, rank))
            self.recorded[rank] = reader.recorded
            self.recorded_world = max(self.recorded_world, reader.world)

    def _check_world(self) -> int:
        """The number of ranks that there should be; adds what contradicts it and which ranks are missing."""
        found, stated = self.found, stated_world(self.stated)
        named = found.group.world
        claims = {"the file names say": named, "fsdp_config.json says": stated}
        told = {words: world for words, world in claims.items() if world}
        world = named or stated or max(self.recorded_world, max(found.ranks, default=-1) + 1)
        missing = sorted(set(range(min(world, _MAX_RANKS))) - set(found.ranks))
        if self.recorded_world > world or (missing and 0 < self.recorded_world < world):
            told["the tensors say"] = self.recorded_world
        if contradicted := len(set(told.values())) > 1:
            seen = {named, self.recorded_world} - {None, 0}
            self.problems.append(
                IncompleteError(
                    "how many ranks are there? " + ", ".join([f"{words} {size}" for words, size in told.items()]),
                    hint="fsdp_config.json alone differs: correct it, or delete it, for it is not needed"
                    if len(seen) == 1 and stated not in (None, *seen)
                    else "files of different runs are mixed, or were renamed; bring together the files of one run",
                )
            )
        beyond = [rank for rank in found.ranks if rank >= world]
        if beyond:
            self.problems.append(IncompleteError(f"{ranks_in_words(beyond)} cannot be in a world of {world} ranks"))
        if missing and not (contradicted and self.gatherer.entries and not self.gatherer.incomplete()):
            self._report_missing(missing, world)
        return world

    def _report_missing(self, missing: list[int], world: int) -> None:
        """A problem, or where replicas hold all that the missing ranks held, a warning."""
        incomplete = self.gatherer.incomplete()
        if incomplete or not self.gatherer.entries:
            self.problems.append(
                IncompleteError(
                    f"{ranks_in_words(missing)} of {world} {'are' if len(missing) > 1 else 'is'} missing: "
                    f"{len(incomplete)} of {len(self.gatherer.entries)} tensors have holes",
                    hint="fetch their files, or name the place where they are with --also DIR (node-local disks)",
                )
            )
        else:
            self.notes.append(
                Note(
                    f"{ranks_in_words(missing)} of {world} {'are' if len(missing) > 1 else 'is'} missing; the other "
                    "ranks hold replicas of all that they held, which stand in",
                    level="warning",
                )
            )

    def _write_notes(self) -> None:
        found = self.found
        if self.source.path.is_file() and len(found.ranks) > 1:
            self.notes.append(Note(f"{self.source.path.name} is one of {len(found.ranks)} rank files; all were read"))
        if self.gatherer.reordered:
            self.notes.append(
                Note(
                    "recorded as (Shard, Shard) by torch 2.2 to 2.4 and read as those versions' FSDP2 laid them: "
                    "tensor parallelism first",
                    tuple(self.gatherer.reordered),
                    "warning",
                )
            )
        full = self.gatherer.read_ranks - self.gatherer.empty_ranks
        if self.gatherer.kinds() == ["tensor"] and len(full) > 1:
            self.notes.append(
                Note(
                    f"all tensors are plain, so that {ranks_in_words(full)} are taken for replicas; --check-replicas "
                    "compares their bytes",
                    level="note" if found.group.layout == "verl" else "warning",
                )
            )

    def _kinds(self, version: str | None) -> list[str]:
        """The kinds of tensors in words, the most frequent first."""
        words = {
            "DTensor": f"FSDP{version or ''} DTensor",
            "ShardedTensor": "FSDP1 ShardedTensor",
            "tensor": "plain tensors",
        }
        if any(is_flat_parameter(name) for name in self.gatherer.entries):
            return ["FSDP1 flat parameters"]
        kinds = [kind for kind in self.gatherer.kinds() if kind != "tensor"] or self.gatherer.kinds()
        return [words[kind] for kind in kinds]

    def _unflatten(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None, ranks: int
    ) -> Mapping[str, Tensor]:
        """The tensors with FSDP1's flat parameters taken apart, where the parameters' shapes are known."""
        flats = {name: tensor for name, tensor in tensors.items() if is_flat_parameter(name)}
        if not flats:
            return tensors
        plain = [name for name in flats if self.gatherer.entries[name].first.kind == "tensor"]
        if plain and ranks > 1:
            self.problems.append(
                IncompleteError(
                    f"{items_in_words(plain)}: plain tensors of {ranks} ranks, so that nothing tells their order",
                    hint="save within FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT)",
                )
            )
            return tensors
        shapes: Mapping[str, Shape] | None = self.source.known_shapes(config)
        if shapes is None:
            self.problems.append(shapes_unknown(list(flats), has_config=config is not None))
            return tensors
        rest = {name: tensor for name, tensor in tensors.items() if name not in flats}
        parameters, problems = unflatten(flats, shapes, self.fragments, rest, ranks, self._order_finder())
        self.problems += problems
        return {**parameters, **rest}

    def _order_finder(self) -> FindOrder | None:
        """How to find the order in flat parameters, where the known shapes have none."""
        reference = self.source.reference
        if reference is None:
            return None
        return lambda flat, names: order_by_values(flat, names, self.source.roots, reference)


def _title(kinds: Sequence[str], ranks: int, world: int, mesh: tuple[tuple[str, int], ...]) -> str:
    """One line for people: "FSDP2 DTensor, 4 ranks, mesh (fsdp=4)"."""
    parts = [" and ".join(kinds) or "no tensors"]
    parts.append(f"{world} rank{'s' if world != 1 else ''}" if ranks == world else f"{ranks} of {world} ranks")
    if mesh:
        parts.append("mesh (" + ", ".join([f"{name}={size}" for name, size in mesh]) + ")")
    return ", ".join(parts)


def _fsdp_version(stated: Mapping[str, Any]) -> str | None:
    """Version "1" or "2", from verl's `FSDP_version` or SkyRL's `fsdp_strategy`."""
    version = stated.get("FSDP_version")
    if version in (1, 2):
        return str(version)
    return {"fsdp": "1", "fsdp2": "2"}.get(str(stated.get("fsdp_strategy")))


def stated_world(stated: Mapping[str, Any]) -> int | None:
    """The `world_size` of `fsdp_config.json`, or None."""
    world = stated.get("world_size")
    return world if isinstance(world, int) and not isinstance(world, bool) and world > 0 else None
