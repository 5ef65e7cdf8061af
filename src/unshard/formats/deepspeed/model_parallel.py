"""From what each model-parallel rank holds to the whole model: layers of a pipeline, shards of tensor parallelism.

`mp_rank` = stage * tensor ranks + tensor rank. Without a pipeline module there are no stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unshard.checkpoint import Dialect, Note
from unshard.errors import FormatError, IncompleteError, UnshardError
from unshard.formats.contract import Source
from unshard.formats.deepspeed.absent import FETCH, missing_in_words
from unshard.formats.deepspeed.experts import refuse_other_experts
from unshard.formats.deepspeed.files import TagFiles
from unshard.formats.deepspeed.megatron_args import read_args
from unshard.formats.deepspeed.pipeline import masters_of_layers, outline, read_layers
from unshard.formats.deepspeed.pipeline_names import name_layers
from unshard.formats.deepspeed.states import ModelStates
from unshard.formats.deepspeed.stored import read_state
from unshard.formats.deepspeed.tensor_parallel import Joined, join_megatron_ranks, join_ranks
from unshard.formats.megatron.ranks.checks import check_recorded
from unshard.formats.megatron.ranks.pre_core import is_pre_core
from unshard.tensors import Tensor
from unshard.words import items_in_words

_MOST_RANKS = 1 << 16


@dataclass(slots=True)
class WholeModel:
    """The tensors of all model-parallel ranks together, and what goes into the catalog beside them.

    cuts: how often each kind of cut occurred, in words; empty where nothing was cut.
    """

    tensors: Mapping[str, Tensor]
    dialect: Dialect = "huggingface"
    facts: Mapping[str, Any] = field(default_factory=dict)
    mesh: tuple[tuple[str, int], ...] = ()
    cuts: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()


def missing_ranks(states: Mapping[int, ModelStates]) -> Iterable[UnshardError]:
    """A problem that names the files of model states that are missing: `mp_world_size` says how many there are."""
    said = [state.recorded.get("mp_world_size") for state in states.values()]
    counts = {count for count in said if type(count) is int}
    if len(counts) > 1:
        yield IncompleteError(
            f"files of model states speak of {items_in_words([str(count) for count in sorted(counts)])} model-parallel "
            "ranks: they are of different runs",
            hint="bring together the files of one run",
        )
        return
    count = max([*counts, max(states) + 1])
    if count > _MOST_RANKS:
        raise FormatError(f"model states speak of {count:,} model-parallel ranks, more than any cluster has")
    missing = [f"mp_rank_{rank:02d}_model_states.pt" for rank in range(count) if rank not in states]
    if missing:
        yield IncompleteError(missing_in_words(missing, f"{count:,} model-parallel ranks"), hint=FETCH)


def join_model(
    source: Source,
    files: TagFiles,
    states: Mapping[int, ModelStates],
    held: Mapping[int, Mapping[str, Tensor]],
    widen: Callable[[Mapping[str, Tensor], Iterable[str]], dict[str, Tensor]],
    problems: list[UnshardError],
) -> WholeModel:
    """The whole model; what is wrong goes to `problems`.

    states: by `mp_rank`. held: what that rank's optimizer, or its module, has. widen: from the tensors of a rank and
    the names of those that have masters, all tensors as they stand beside masters.
    """
    first = states[min(states)]
    facts = read_args(first.recorded.get("args"))
    version = first.recorded.get("checkpoint_version")
    parts: Sequence[Mapping[str, Tensor]] = [held[rank] for rank in sorted(held)]
    dialect: Dialect = "huggingface"
    notes: tuple[Note, ...] = ()
    stages = 1
    if files.layers:
        parts, stages = _read_pipeline(files, states, parts, widen, problems)
        try:
            naming = name_layers(outline(parts[0]))
        except IncompleteError as error:
            problems.append(error)
            return WholeModel({}, facts=facts)
        parts = [{(new := naming.names.get(old, old)): one.rename(new) for old, one in part.items()} for part in parts]
        dialect, notes = naming.dialect, naming.notes
    elif is_pre_core(name for part in parts for name in part):
        dialect = "megatron"
    problems += _refuse_experts(source, files, states, len(parts))
    joined = _join(source, states, parts, dialect, version, facts, problems)
    problems += joined.problems
    sizes = {"tp": len(parts), "pp": stages}
    mesh = tuple([(kind, size) for kind, size in sizes.items() if size > 1])
    return WholeModel(joined.tensors, dialect, facts, mesh, joined.cuts if len(parts) > 1 else {}, notes)


def _refuse_experts(
    source: Source, files: TagFiles, states: Mapping[int, ModelStates], tensor_ranks: int
) -> Iterable[UnshardError]:
    """Problems where it is not known which ranks hold which experts."""
    try:
        for state in states.values():
            refuse_other_experts(state.recorded)
    except FormatError as error:
        yield error
    if files.experts and files.optimizer and tensor_ranks > 1 and source.weights == "master":
        yield FormatError(
            f"experts and {tensor_ranks} tensor-parallel ranks: which of them hold the masters of which experts is not "
            "recorded",
            hint="--weights model takes the experts, and everything else, from the model states",
        )


def _join(
    source: Source,
    states: Mapping[int, ModelStates],
    parts: Sequence[Mapping[str, Tensor]],
    dialect: Dialect,
    version: object,
    facts: Mapping[str, Any],
    problems: list[UnshardError],
) -> Joined:
    if dialect == "megatron":
        number = float(version) if isinstance(version, float) or version in (0, 1, 2, 3) else 0.0
        joined = join_megatron_ranks(parts, number, source.add_told(facts), source.axes)
        if not joined.problems:
            problems += check_recorded(joined.tensors, facts, all_there=not problems)
        return joined
    first = states[min(states)]
    return join_ranks(parts, first.recorded.get("universal_checkpoint_info"), axes=source.axes, buffers=first.buffers)


def _read_pipeline(
    files: TagFiles,
    states: Mapping[int, ModelStates],
    held: Sequence[Mapping[str, Tensor]],
    widen: Callable[[Mapping[str, Tensor], Iterable[str]], dict[str, Tensor]],
    problems: list[UnshardError],
) -> tuple[list[dict[str, Tensor]], int]:
    """Per tensor-parallel rank all parameters as `LL.name`, masters where there are any; and the number of stages.

    Files that are missing or damaged are told alone, without the masters that then have no layers.
    """
    before = len(problems)
    contents = {place: read_state(file, place[1], problems) for place, file in sorted(files.layers.items())}
    stated = [name for state in states.values() for group in state.groups or () for name in group]
    least = max([_tensor_ranks(state) for state in states.values()])
    numbered = any("-model_0" in file.path.name for file in files.layers.values())
    parts = read_layers(contents, stated, problems, least=least, numbered=numbered)
    stages = max(len(states) // len(parts), 1)
    if not any(held) or len(problems) > before:
        return parts, stages
    try:
        masters = masters_of_layers(held, parts)
    except UnshardError as error:
        problems.append(error)
        return parts, stages
    buffers = {name for state in states.values() for name in state.buffers}
    return [widen(part, own.keys() | buffers) | own for part, own in zip(parts, masters, strict=True)], stages


def _tensor_ranks(states: ModelStates) -> int:
    """How many tensor-parallel ranks a file of model states speaks of; 1 where it says nothing."""
    degrees = states.recorded.get("checkpoint_parallel_dimensions")
    said = degrees.get("tp_degree") if isinstance(degrees, Mapping) else None
    return said if type(said) is int else 1
