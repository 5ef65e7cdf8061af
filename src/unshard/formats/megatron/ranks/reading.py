"""Reads all ranks into one catalog of full tensors, and says everything at once that is wrong with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import InitVar, dataclass, field, replace
from itertools import islice
from typing import Any

from unshard.checkpoint import Checkpoint, Note, Shape
from unshard.errors import FormatError, IncompleteError, UnshardError, raise_all
from unshard.formats.contract import Source
from unshard.formats.megatron.beside import look_beside
from unshard.formats.megatron.experts import stack_experts
from unshard.formats.megatron.names import Skipped
from unshard.formats.megatron.ranks.checks import check_recorded
from unshard.formats.megatron.ranks.contents import RankContent, read_rank
from unshard.formats.megatron.ranks.directories import RankDirectory, RankSet, collect_ranks
from unshard.formats.megatron.ranks.expert_ranks import (
    check_collisions,
    expert_tensor_rank,
    missing_directories,
    settle_expert_tensor,
)
from unshard.formats.megatron.ranks.joining import Joiner, Shard
from unshard.formats.megatron.ranks.layers import LAYER, first_layers, layers_of, recorded_counts
from unshard.formats.megatron.ranks.local_experts import is_expert, name_experts
from unshard.formats.megatron.ranks.pre_core import is_pre_core, to_core
from unshard.formats.megatron.ranks.sizes import Coordinates, Sizes, check_one_run, settle_sizes
from unshard.formats.megatron.ranks.tensor_parallel import Neighbours
from unshard.formats.megatron.sections import join_replicas
from unshard.model_config import sizes_for_ranks
from unshard.parallel import ARGUMENTS
from unshard.tensors import Tensor
from unshard.words import items_in_words, one_line

_EMBEDDING = "embedding.word_embeddings.weight"
_MAX_SHARDS = 2_000_000
"""Tensors on all ranks, each expert by itself. The largest models come to a third of that; a few bytes claim any number
of experts."""


def read_ranks(source: Source, format_name: str) -> Checkpoint:
    """The catalog of the ranks at `source.path` and in its further roots.

    Raises NotACheckpointError where there are none, FormatError where no rank's file can be read.
    """
    found = collect_ranks(source)
    skipped = Skipped()
    problems: list[UnshardError] = list(found.problems)
    contents: list[RankContent] = []
    for number, directory in enumerate(found.directories):
        content = _attempt(directory, number, skipped, problems)
        contents += [content] if content is not None else []
    if not contents:
        raise_all(problems)
    beside = look_beside(found.places[0])
    own = _recorded(contents)
    unread = {directory.name for directory in found.directories} - {content.directory.name for content in contents}
    source = replace(source, told={**sizes_for_ranks(beside.surroundings.config), **source.told})
    reading = _Reading(source, contents, unread, {**beside.facts, **own}, problems)
    tensors = reading.read()
    return beside.around(
        Checkpoint(
            format=format_name,
            title=_title(len(contents), reading.expected, contents[0].iteration, reading.mesh),
            roots=found.roots,
            tensors=tensors,
            world_size=own["world_size"] if type(own.get("world_size")) is int else None,
            mesh=reading.mesh,
            placements=dict(reading.joiner.cuts),
            dialect="megatron",
            facts=own,
            skipped=skipped.lines(),
            notes=tuple(_notes(source, found, own)),
            problems=tuple(problems),
        )
    )


def _attempt(
    directory: RankDirectory, number: int, skipped: Skipped, problems: list[UnshardError]
) -> RankContent | None:
    """The content of a rank's file; None where it cannot be read, which is added to `problems`."""
    try:
        return read_rank(directory, number, skipped, problems)
    except FormatError as error:
        problems.append(error)
        return None


def _recorded(contents: Sequence[RankContent]) -> dict[str, Any]:
    """The args of the first rank that has any. `check_one_run` compares those that must be the same on all ranks."""
    facts = next((content.facts for content in contents if content.facts), {})
    return {name: value for name, value in facts.items() if value is not None}


def _notes(source: Source, found: RankSet, facts: Mapping[str, Any]) -> Iterator[Note]:
    if found.is_part:
        yield Note(f"{one_line(source.path.name)} is one of {len(found.directories)} ranks; all were read")
    if not facts:
        yield Note(
            "the files have no `args`: the numbers of ranks are told by the directories' names, those of layers by "
            "counting them in the order of pipeline stages"
        )


def _title(read: int, ranks: int, iteration: int | None, mesh: Sequence[tuple[str, int]]) -> str:
    """One line for people: "Megatron-LM, 4 ranks, iteration 10, mesh (tp=2, pp=2)"."""
    counted = f"{ranks} rank{'s' if ranks != 1 else ''}" if read == ranks else f"{read} of {ranks} ranks"
    parts = ["Megatron-LM", counted]
    if iteration:
        parts.append(f"iteration {iteration}")
    if mesh:
        parts.append("mesh (" + ", ".join([f"{name}={size}" for name, size in mesh]) + ")")
    return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class _Held:
    """What one rank holds of one stage, under global names: its own shards and their shapes."""

    place: str
    coordinates: Coordinates
    tensors: Mapping[str, Tensor]
    shapes: Mapping[str, Shape]


@dataclass(slots=True)
class _Reading:
    """One reading: from the ranks' contents to full tensors.

    unread:   names of rank directories whose files cannot be read.
    facts:    what was recorded, and what was told where nothing was; `told` are the names of the latter.
    expected: how many rank directories there should be.
    """

    source: Source
    contents: Sequence[RankContent]
    unread: Set[str]
    recorded: InitVar[Mapping[str, Any]]
    problems: list[UnshardError]
    facts: Mapping[str, Any] = field(init=False)
    told: Set[str] = field(init=False)
    joiner: Joiner = field(default_factory=lambda: Joiner(1, 1))
    mesh: tuple[tuple[str, int], ...] = ()
    expected: int = 0

    def __post_init__(self, recorded: Mapping[str, Any]) -> None:
        self.facts = self.source.add_told(recorded)
        self.told = {name for name in self.source.told if recorded.get(name) is None}
        self.expected = len(self.contents) + len(self.unread)

    def read(self) -> Mapping[str, Tensor]:
        """The canonical tensors; what is wrong goes to `problems`."""
        if self.facts.get("moe_extended_tp"):
            self.problems.append(
                FormatError(
                    "args.moe_extended_tp is set: experts are cut over tensor- and expert-parallel ranks at once, "
                    "which cannot be read",
                    hint="load the checkpoint in its Megatron-LM and save it without --moe-extended-tp",
                )
            )
            return {}
        self.problems += check_one_run(self.contents)
        sizes, places = settle_sizes(self.contents, self.facts, self.problems, self.told)
        stages = self._stages(sizes, places)
        expert_tensor = self._settle_experts(sizes, places, stages)
        missing = missing_directories(sizes, places, expert_tensor)
        self._report_missing([name for name in missing if name not in self.unread])
        self.mesh = sizes.mesh(expert_tensor or sizes.tensor)
        self.joiner = Joiner(sizes.tensor, expert_tensor or sizes.tensor, self.source.axes)
        full = self._join(sizes, stages)
        self.problems += self.joiner.problems(all_there=not missing)
        tensors, wrong = stack_experts(full)
        self.problems += wrong if not missing else ()
        recorded = {name: value for name, value in self.facts.items() if name not in self.told}
        self.problems += check_recorded(tensors, recorded, all_there=not missing)
        return tensors

    def _report_missing(self, names: Sequence[str]) -> None:
        if not names:
            return
        self.expected += len(names)
        are = "is" if len(names) == 1 else "are"
        text = f"{len(names)} of {self.expected} ranks {are} missing: no {items_in_words(names)}"
        hint = "fetch these directories, or name the place where they are with --also DIR (node-local disks)"
        if self.told & set(ARGUMENTS.values()):
            hint += "; or correct --parallel"
        self.problems.append(IncompleteError(text, hint=hint))

    def _stages(self, sizes: Sizes, places: Sequence[Coordinates]) -> dict[int, list[_Held]]:
        """Stage v * P + p → what each of its ranks holds. Raises FormatError for more tensors than any model has."""
        models: dict[int, list[tuple[RankContent, Coordinates, Mapping[str, Tensor]]]] = defaultdict(list)
        layers: dict[int, set[int]] = defaultdict(set)
        refused: dict[str, UnshardError] = {}
        pre_core = is_pre_core(name for content in self.contents for model in content.models for name in model)
        for content, place in zip(self.contents, places, strict=True):
            for chunk, model in enumerate(content.models):
                stage = chunk * sizes.pipeline + place.pipeline
                try:
                    core = to_core(model, content.version, self.facts, sizes.tensor) if pre_core else model
                except FormatError as error:
                    refused.setdefault(error.message, error)
                    continue
                models[stage].append((content, place, core))
                layers[stage] |= layers_of(core)
        self.problems += refused.values()
        recorded = recorded_counts(self.facts, sizes.pipeline, sizes.virtual)
        first = first_layers(layers, sizes.pipeline * sizes.virtual, recorded, self.problems)
        experts = self.facts.get("num_experts")
        stages: dict[int, list[_Held]] = defaultdict(list)
        left = _MAX_SHARDS
        for stage, ranks in sorted(models.items()):
            for content, place, model in ranks:
                numbered = {_global_name(name, first[stage]): tensor for name, tensor in model.items()}
                found = name_experts(numbered, place.expert, sizes.expert, experts if type(experts) is int else None)
                try:
                    named = dict(islice(found, left + 1))
                except FormatError as error:
                    self.problems.append(FormatError(f"{content.directory.path}: {error.message}", hint=error.hint))
                    continue
                left -= len(named)
                if left < 0:
                    raise FormatError(
                        f"{content.directory.path}: with its experts there are over {_MAX_SHARDS:,} tensors"
                    )
                shapes = {name: tensor.shape for name, tensor in named.items()}
                stages[stage].append(_Held(content.directory.name, place, named, shapes))
        return stages

    def _settle_experts(
        self, sizes: Sizes, places: Sequence[Coordinates], stages: Mapping[int, Sequence[_Held]]
    ) -> int | None:
        """How many ranks share an expert; None where there are no experts."""
        held = [rank for ranks in stages.values() for rank in ranks]
        experts = [(name, shape) for rank in held for name, shape in rank.shapes.items() if is_expert(name)]
        if not experts:
            return None
        second = [shape for name, shape in experts if name.endswith("linear_fc2.weight") and len(shape) == 2]
        columns = second[0][1] if second else 0
        size = settle_expert_tensor(sizes, self.facts, places, columns, self.problems, self.told)
        self.problems += check_collisions(sizes, size)
        return size

    def _join(self, sizes: Sizes, stages: Mapping[int, Sequence[_Held]]) -> dict[str, Tensor]:
        """All tensors in the order of stages; copies on several stages (the embedding beside MTP) are replicas."""
        held = [rank for ranks in stages.values() for rank in ranks]
        rows = [shape[0] for rank in held for name, shape in rank.shapes.items() if name.endswith(_EMBEDDING) and shape]
        vocabulary = rows[0] if rows else None
        full: dict[str, Tensor] = {}
        for _, ranks in sorted(stages.items()):
            shards: dict[str, list[tuple[_Held, Shard]]] = defaultdict(list)
            for rank in ranks:
                expert = expert_tensor_rank(sizes, self.joiner.expert_ranks, rank.coordinates)
                for name, tensor in rank.tensors.items():
                    number = expert if is_expert(name) else rank.coordinates.tensor
                    shards[name].append((rank, Shard(number, rank.place, tensor)))
            for name, pieces in shards.items():
                near = Neighbours(pieces[0][0].shapes, self.facts, vocabulary)
                joined = self.joiner.join(name, [shard for _, shard in pieces], near)
                if joined is not None:
                    full[name] = joined if name not in full else self._merge(full[name], joined)
        return full

    def _merge(self, earlier: Tensor, later: Tensor) -> Tensor:
        try:
            return join_replicas([earlier, later])
        except ValueError as error:
            self.joiner.wrong.append(f"{error} on different pipeline stages")
            return earlier


def _global_name(name: str, first: int) -> str:
    """The name with the layer's number in the model, where the stage begins with layer `first`."""
    match = LAYER.fullmatch(name)
    return f"{match[1]}{int(match[2]) + first}{match[3]}" if match else name
