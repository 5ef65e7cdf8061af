"""Reads verl's adapter files of all ranks into full tensors; see `adapter_files` for where they lie."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unshard.checkpoint import Note, Shape
from unshard.errors import FormatError, IncompleteError, NotACheckpointError, UnshardError, raise_all
from unshard.formats.megatron.adapter_files import FILE, ROOT, list_adapter_files
from unshard.formats.megatron.experts import stack_experts
from unshard.formats.megatron.names import strip_wrappers
from unshard.formats.megatron.ranks.contents import RankContent
from unshard.formats.megatron.ranks.directories import RankDirectory
from unshard.formats.megatron.ranks.expert_ranks import expert_tensor_rank, missing_directories
from unshard.formats.megatron.ranks.joining import Joiner, Shard
from unshard.formats.megatron.ranks.layers import LAYER, layers_of, recorded_counts
from unshard.formats.megatron.ranks.local_experts import is_expert, name_experts
from unshard.formats.megatron.ranks.sizes import settle_sizes
from unshard.formats.megatron.ranks.tensor_parallel import Neighbours
from unshard.formats.state_dict import read_whole
from unshard.formats.torch_file import StoredTensor, read_torch_file
from unshard.tensors import SourceFile, Tensor
from unshard.words import items_in_words, ranges_in_words

_STATE = "adapter_state_dict"


@dataclass(slots=True)
class AdapterFiles:
    """Full tensors of adapters under canonical names; chunks lie in the root `ROOT`."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    mesh: tuple[tuple[str, int], ...] = ()
    notes: list[Note] = field(default_factory=list)
    problems: list[UnshardError] = field(default_factory=list)


def read_adapter_files(
    directory: Path, facts: Mapping[str, Any], axes: Mapping[str, int | None] | None = None
) -> AdapterFiles:
    """The adapters of all ranks in a directory. `facts`: what was recorded of parallel sizes and layers.

    Raises NotACheckpointError where there are none, FormatError where no file can be read.
    """
    found = AdapterFiles()
    contents = list(_read_contents(directory, found.problems))
    if not contents:
        raise_all(found.problems)
        raise NotACheckpointError(f"{directory}: no files mp_rank_*_adapter.pt lie here")
    chunks = facts.get("virtual_pipeline_model_parallel_size")
    named = {name: value for name, value in facts.items() if name != "virtual_pipeline_model_parallel_size"}
    sizes, places = settle_sizes(contents, named, found.problems)
    expert_tensor = facts.get("expert_tensor_parallel_size")
    expert_tensor = expert_tensor if type(expert_tensor) is int and expert_tensor > 0 else sizes.tensor
    has_experts = any(is_expert(name) for content in contents for name in content.names)
    missing = missing_directories(sizes, places, expert_tensor if has_experts else None)
    if missing:
        files = items_in_words([f"{name}_adapter.pt" for name in missing])
        found.problems.append(IncompleteError(f"{directory}: ranks are missing: no {files}"))
    found.mesh = sizes.mesh(expert_tensor)
    first = _first_layers(contents, [place.pipeline for place in places], facts, chunks, found)
    joiner = Joiner(sizes.tensor, expert_tensor, axes or {})
    shards: dict[str, list[Shard]] = defaultdict(list)
    shapes: dict[str, dict[str, Shape]] = {}
    experts = facts.get("num_experts")
    for content, place in zip(contents, places, strict=True):
        numbered = {_renumber(name, first[place.pipeline]): value for name, value in content.models[0].items()}
        try:
            own = dict(name_experts(numbered, place.expert, sizes.expert, experts if type(experts) is int else None))
        except FormatError as error:
            found.problems.append(FormatError(f"{content.directory.path}: {error.message}", hint=error.hint))
            continue
        rank = expert_tensor_rank(sizes, expert_tensor, place)
        for name, tensor in own.items():
            shards[name].append(Shard(rank if is_expert(name) else place.tensor, content.directory.name, tensor))
            shapes.setdefault(name, {other: value.shape for other, value in own.items()})
    joined = [joiner.join(name, pieces, Neighbours(shapes[name], facts)) for name, pieces in shards.items()]
    found.problems += joiner.problems(all_there=not missing)
    found.tensors, wrong = stack_experts({tensor.name: tensor for tensor in joined if tensor is not None})
    found.problems += wrong
    return found


def _read_contents(directory: Path, problems: list[UnshardError]) -> Sequence[RankContent]:
    """What each rank's file holds; files and entries that cannot be read are added to `problems`."""
    contents: list[RankContent] = []
    for number, name in enumerate(list_adapter_files(directory)):
        match = FILE.fullmatch(name)
        assert match is not None
        numbers = tuple([int(text) for text in match.groups()[2:] if text is not None])
        file = SourceFile(ROOT, name)
        rank = RankDirectory(match["rank"], int(match["tensor"]), numbers, directory / name, file)
        try:
            root = read_torch_file(directory / name, file).root
            state = root.get(_STATE) if isinstance(root, Mapping) else None
            if not isinstance(state, Mapping) or not state:
                raise FormatError(f"{directory / name}: holds no `{_STATE}`")
            contents.append(RankContent(rank, number, {}, None, 3.0, (_read_state(rank, number, state),)))
        except FormatError as error:
            problems.append(error)
    return contents


def _read_state(rank: RankDirectory, number: int, state: Mapping[Any, Any]) -> Mapping[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for stored, value in state.items():
        if not isinstance(stored, str) or not isinstance(value, StoredTensor):
            raise FormatError(f"{rank.path}: {str(stored)[:200]!r} is no tensor that can be read")
        name = strip_wrappers(stored)
        tensors[name] = Tensor(name, value.dtype, value.shape, read_whole(value, number))
    return tensors


def _first_layers(
    contents: Sequence[RankContent],
    stages: Sequence[int],
    facts: Mapping[str, Any],
    chunks: Any,
    found: AdapterFiles,
) -> Mapping[int, int]:
    """Pipeline rank → the number of its first layer.

    Not all layers need an adapter, so that counting them tells less than what training recorded. Of virtual stages verl
    saved the first of each rank only, which is said; those are the first stages of the model.
    """
    ranks = max(stages) + 1
    virtual = chunks if type(chunks) is int and chunks > 1 else 1
    held: dict[int, set[int]] = defaultdict(set)
    for content, stage in zip(contents, stages, strict=True):
        held[stage] |= layers_of(content.models[0])
    counts = recorded_counts(facts, ranks, virtual)
    if counts is None:
        counts = tuple([max(held[stage], default=-1) + 1 for stage in range(ranks)])
        if ranks > 1 and len(set(counts)) > 1:
            found.problems.append(_layers_unknown(counts))
    elif wrong := [stage for stage in range(ranks) if max(held[stage], default=-1) >= counts[stage]]:
        found.problems.append(
            IncompleteError(
                f"training recorded {counts[wrong[0]]} layers on pipeline stage {wrong[0]}, but its file numbers them "
                f"to {max(held[wrong[0]])}",
                hint="bring together the files of one run",
            )
        )
    if virtual > 1:
        text = f"verl saved the adapters of the first of {virtual} virtual stages of each rank only"
        if len(counts) == ranks * virtual:
            lost = range(sum(counts[:ranks]), sum(counts))
            text += f": those of layers {ranges_in_words(lost)} are not in the checkpoint"
        found.notes.append(Note(text, level="warning"))
    return {stage: sum(counts[:stage]) for stage in range(ranks)}


def _layers_unknown(counts: Sequence[int]) -> UnshardError:
    listed = ", ".join([f"{count}" for count in counts])
    return IncompleteError(
        f"the pipeline stages have adapters up to layer {listed}, counted from each stage's first, and nothing tells "
        "how many layers each stage has",
        hint="bring the transformer_config.json of the run beside adapter_checkpoint",
    )


def _renumber(name: str, first: int) -> str:
    match = LAYER.fullmatch(name)
    return f"{match[1]}{int(match[2]) + first}{match[3]}" if match else name
