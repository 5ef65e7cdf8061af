"""Files of optimizer states: one data-parallel rank's partition of the flat masters. Moments are not looked at.

Sources: DeepSpeed `runtime/zero/stage_1_and_2.py` (`state_dict`), `runtime/zero/stage3.py` (`_rigid_state_dict`),
`runtime/bf16_optimizer.py` (`state_dict`, which has no `zero_stage` and is like stage 1).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from unshard.checkpoint import Note
from unshard.dtypes import F32
from unshard.errors import FormatError, IncompleteError, UnshardError
from unshard.formats.deepspeed.absent import FETCH
from unshard.formats.deepspeed.files import File
from unshard.formats.deepspeed.stored import attempt, read_content
from unshard.formats.torch_file import Opaque, StoredTensor
from unshard.words import count_in_words, items_in_lines, ranks_in_words

_MASTERS = {3: "fp32_flat_groups"}
_MASTERS_BELOW_3 = "single_partition_of_fp32_groups"
_MAX_GROUPS = 1 << 16
_MAX_STEP = 1 << 53
MAX_RANKS = 1 << 18
"""Data-parallel ranks, more than any cluster has."""
_OF_ONE_SAVE = (
    ("counts", "partitions"),
    ("stage", "ZeRO stage"),
    ("step", "step of the optimizer"),
    ("version", "version of DeepSpeed"),
    ("kinds", "types of masters"),
    ("gaps", "gaps between parameters"),
)
"""Attributes of partitions that are equal in all files of a save, and what they are."""
_COPY = "fetch the files again, all of one save"

Slices = Mapping[str, tuple[int, int]]
"""Parameter → (first element in the partition, elements)."""


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """What one data-parallel rank's file holds.

    counts:  over how many ranks each group is partitioned.
    flats:   one-dimensional masters, one per group (stage 3: per sub-group).
    gaps:    per group and parameter, elements between it and the next one; empty where there are none.
    slices:  per group, where parameters lie, which proves the order; empty where it is not recorded.
    step:    of the base optimizer, None where it cannot be told.
    version: of DeepSpeed, None where it is not recorded.
    """

    rank: int
    file: File
    stage: int
    counts: tuple[int, ...]
    flats: tuple[StoredTensor, ...]
    gaps: tuple[tuple[int, ...], ...] = ()
    slices: tuple[Slices, ...] = ()
    step: float | None = None
    version: str | None = None

    @property
    def ranks(self) -> int:
        """How many data-parallel ranks hold the masters."""
        return max(self.counts, default=1)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The types of the flat masters: fp32, unless `bf16_master_weights_and_grads` or its like was set."""
        return tuple([flat.dtype.name for flat in self.flats])


@dataclass(frozen=True, slots=True)
class Partitions:
    """The partitions of one model-parallel rank, in the order of data-parallel ranks; none where something is wrong."""

    stage: int
    partitions: tuple[Partition, ...]
    notes: tuple[Note, ...] = ()


def read_partitions(
    files: Mapping[int, File], problems: list[UnshardError], data_ranks: object = None
) -> Partitions | None:
    """The partitions in the files of one model-parallel rank, by data-parallel rank; what is wrong goes to `problems`.

    How many there must be is what the first one says. Files of higher ranks are of an earlier save with more ranks, or
    replicas (MiCS); neither is read. data_ranks: `dp_world_size` of the model states, which tells whether it is not the
    first one that is left over.
    """
    found: dict[int, Partition] = {}
    for rank, file in sorted(files.items()):
        partition = attempt(partial(read_partition, file, rank), problems)
        if partition is not None:
            found[rank] = partition
    if not found:
        return None
    first = found[min(found)]
    needed = {rank: one for rank, one in found.items() if rank < first.ranks}
    beyond = [one for rank, one in found.items() if rank >= first.ranks]
    wrong = [*_check(first, needed, files), *_check_beyond(first, beyond, data_ranks)]
    problems += wrong
    if wrong or len(needed) < first.ranks:
        return None
    return Partitions(first.stage, tuple(needed.values()), tuple(_note_beyond(first, beyond)))


def _check(first: Partition, found: Mapping[int, Partition], files: Mapping[int, File]) -> Iterator[UnshardError]:
    missing = [rank for rank in range(first.ranks) if rank not in files]
    if missing:
        name = first.file.name.path.replace(f"pp_rank_{first.rank}_", "pp_rank_{}_")
        listed = items_in_lines([name.format(rank) for rank in missing])
        yield IncompleteError(
            f"the masters are partitioned over {first.ranks} data-parallel ranks; {ranks_in_words(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing:\n{listed}",
            hint=FETCH,
        )
    for attribute, what in _OF_ONE_SAVE:
        kinds: dict[Any, list[int]] = {}
        for rank, one in found.items():
            kinds.setdefault(getattr(one, attribute), []).append(rank)
        if len(kinds) > 1:
            told = [f"{ranks_in_words(ranks)}: {_plain(value)}" for value, ranks in kinds.items()]
            yield IncompleteError(
                f"files of optimizer states are of different saves; {what}:\n{items_in_lines(told)}", hint=_COPY
            )


def _check_beyond(first: Partition, beyond: Sequence[Partition], data_ranks: object) -> Iterator[UnshardError]:
    """A problem where files beyond those that the first one counts are of the save, and the first ones are not."""
    current = [one.rank for one in beyond if one.counts != first.counts and one.ranks == data_ranks]
    if current:
        yield IncompleteError(
            f"the model states are of {data_ranks} data-parallel ranks, and so is the file of optimizer states of "
            f"{ranks_in_words(current)}; {first.file.name} is of {first.ranks}, from another save",
            hint=_COPY,
        )


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _note_beyond(first: Partition, beyond: Sequence[Partition]) -> Iterator[Note]:
    replicas = [one.rank for one in beyond if one.counts == first.counts]
    stale = [one.rank for one in beyond if one.counts != first.counts]
    if replicas:
        yield Note(f"{ranks_in_words(replicas)} have replicas of the other partitions, which were not read")
    if stale:
        files = count_in_words(len(stale), "file")
        yield Note(
            f"{files} of optimizer states are left over from a save with more ranks ({ranks_in_words(stale)}; this one "
            f"has {first.ranks}), and were not read",
            level="warning",
        )


def read_partition(file: File, rank: int) -> Partition:
    """The content of a file of optimizer states. Raises FormatError where it is none, or of a kind that is not read."""
    root = read_content(file)
    state = root.get("optimizer_state_dict") if isinstance(root, Mapping) else None
    if not isinstance(state, Mapping):
        raise FormatError(f"{file.name}: holds no optimizer states of DeepSpeed (`optimizer_state_dict`)")
    try:
        return _read(state, file, rank, root.get("ds_version"))
    except FormatError as error:
        raise FormatError(f"{file.name}: {error.message}", hint=error.hint) from error


def _read(state: Mapping[Any, Any], file: File, rank: int, version: object) -> Partition:
    if state.get("ds_zero_partition_groups"):
        raise FormatError(
            "its masters are partitioned over other ranks from group to group (`ds_zero_partition_groups`, AutoEP), "
            "which is not read",
            hint="gather the model in the training script and save it with save_pretrained",
        )
    stage = _stage(state.get("zero_stage"))
    name = _MASTERS.get(stage, _MASTERS_BELOW_3)
    flats = state.get(name)
    if isinstance(flats, StoredTensor):
        flats = [flats]
    if not isinstance(flats, (list, tuple)) or not all(_is_flat(flat) for flat in flats):
        raise FormatError(
            f"has no flat masters in `{name}` (ZeRO stage {stage}); it has {items_in_lines(_keys(state))}",
            hint="--weights model takes the module's own weights instead",
        )
    counts = _counts(state.get("partition_count"), 1 if stage == 3 else len(flats))
    return Partition(
        rank,
        file,
        stage,
        counts,
        tuple(flats),
        tuple(_gaps(state.get("param_alignment_paddings"))),
        tuple(_slices(state.get("param_slice_mappings"))),
        _step(state, file.path),
        version if isinstance(version, str) else None,
    )


def _keys(state: Mapping[Any, Any]) -> list[str]:
    return [f"`{key}`" for key in state if isinstance(key, str)]


def _is_flat(value: Any) -> bool:
    if not isinstance(value, StoredTensor) or not value.dtype.is_float:
        return False
    return len(value.shape) == 1 and (value.strides == (1,) or value.shape[0] < 2)


def _stage(recorded: Any) -> int:
    """The stage: an int, the enum `ZeroStageEnum`, or nothing (BF16_Optimizer)."""
    if isinstance(recorded, Opaque) and len(recorded.args) == 1:
        recorded = recorded.args[0]
    if recorded is None:
        return 1
    if type(recorded) is not int or not 1 <= recorded <= 3:
        raise FormatError("its `zero_stage` is none of 1, 2, 3")
    return recorded


def _counts(recorded: Any, groups: int) -> tuple[int, ...]:
    """`partition_count`: a list per group; one number at stage 3, and in old releases."""
    counts = list(recorded) if isinstance(recorded, (list, tuple)) else [recorded] * max(groups, 1)
    if len(counts) > _MAX_GROUPS or not all(type(count) is int and 0 < count <= MAX_RANKS for count in counts):
        raise FormatError("its `partition_count` is no number of ranks")
    return tuple(counts)


def _gaps(recorded: Any) -> Iterator[tuple[int, ...]]:
    for group in recorded if isinstance(recorded, (list, tuple)) else ():
        if not isinstance(group, (list, tuple)) or not all(type(gap) is int and gap >= 0 for gap in group):
            raise FormatError("its `param_alignment_paddings` are no numbers of elements")
        yield tuple(group)


def _slices(recorded: Any) -> Iterator[Slices]:
    """`param_slice_mappings`: a dict of `fragment_address` per group. What is none is left out: it only proves."""
    for group in recorded if isinstance(recorded, (list, tuple)) else ():
        places: dict[str, tuple[int, int]] = {}
        for name, address in group.items() if isinstance(group, Mapping) else ():
            start, count = (address.get("start"), address.get("numel")) if isinstance(address, Opaque) else (None, None)
            if isinstance(name, str) and type(start) is int and type(count) is int:
                places[name] = (start, count)
        yield places


def _step(state: Mapping[Any, Any], path: Path) -> float | None:
    """The step of the first parameter group in the base optimizer's state."""
    base = state.get("base_optimizer_state") or state.get("optimizer_state_dict")
    groups = base.get("state") if isinstance(base, Mapping) else None
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    step = first.get("step") if isinstance(first, Mapping) else None
    if isinstance(step, StoredTensor):
        return _read_number(step, path)
    return float(step) if isinstance(step, float) or (isinstance(step, int) and abs(step) < _MAX_STEP) else None


def _read_number(tensor: StoredTensor, path: Path) -> float | None:
    """A tensor of one fp32 number, as torch's AdamW counts steps."""
    if tensor.dtype is not F32 or tensor.shape not in ((), (1,)):
        return None
    with path.open("rb") as file:
        file.seek(tensor.storage.offset + 4 * tensor.offset)
        data = file.read(4)
    return float(struct.unpack("<f", data)[0]) if len(data) == 4 else None
