"""Experts of DeepSpeed's MoE layers: the files that hold them, and their fp32 masters in ZeRO's groups.

Each expert has a file, `layer_{L}_expert_{E}_mp_rank_{TT}_model_states.pt`: L counts the MoE layers of a rank, E is the
expert's number in the whole layer, and so is the number in the names inside,
`….deepspeed_moe.experts.deepspeed_experts.{E}.…`. The oldest releases wrote `expert_{E}_mp_rank_…`, with all layers in
it. The file of model states has everything but the experts, and `num_experts`, a number per MoE layer.

The optimizer numbers experts from zero on each expert-parallel rank, and partitions them over fewer ranks than other
parameters: of N data-parallel ranks and P partitions of a group, EP = N / P hold different experts. Data-parallel rank
D has the experts of expert rank D % EP, and of those the partition D // EP; with `use_data_before_expert_parallelism`,
expert rank D // P and partition D % P. Sources: DeepSpeed `runtime/engine.py` (`_save_moe_checkpoint`,
`load_moe_state_dict`), `utils/groups.py` (`_create_expert_and_data_parallel`), and runs of 0.19.8.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from unshard.errors import FormatError, IncompleteError, UnshardError
from unshard.formats.deepspeed.absent import missing_in_words
from unshard.tensors import Tensor
from unshard.words import names_in_words

_EXPERT = re.compile(r"(.*\bdeepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,6})(\..+)")
_DATA_FIRST = "use_data_before_expert_parallelism"
_MOST_EXPERTS = 1 << 16


def is_expert(name: str) -> bool:
    """Whether a parameter is one of an expert's."""
    return _EXPERT.fullmatch(name) is not None


def refuse_other_experts(recorded: Mapping[str, Any]) -> None:
    """Raise FormatError for experts of AutoEP, which keeps other files, names and partitions than MoE layers do.

    recorded: the content of a file of model states. Source: DeepSpeed `runtime/engine.py` (`_save_moe_checkpoint`).
    """
    layers = recorded.get("ds_autoep_layers") or recorded.get("autoep_layers")
    if layers:
        raise FormatError(
            "the model's experts were trained by AutoEP (`ds_autoep_layers` in the model states), which is not read",
            hint="gather the model in the training script and save it with save_pretrained",
        )


def check_files(found: Collection[tuple[int | None, int]], recorded: object, model_rank: int) -> Iterator[UnshardError]:
    """A problem that names all files of experts that are missing.

    found: (MoE layer, expert) of the files of one model-parallel rank; the layer is None in the names of old releases.
    recorded: `num_experts` of its model states: a number per MoE layer.
    """
    counts = _counts(recorded, found)
    if counts and all(layer is None for layer, _ in found) and found:
        expected: list[tuple[int | None, int]] = [(None, expert) for expert in range(max(counts))]
    else:
        expected = [(layer, expert) for layer, count in enumerate(counts) for expert in range(count)]
    there = set(found)
    missing = [_file_name(layer, expert, model_rank) for layer, expert in expected if (layer, expert) not in there]
    if missing:
        yield IncompleteError(
            missing_in_words(missing, f"{len(expected):,} files of experts"),
            hint="fetch the missing files: each expert of each MoE layer has one of its own, and no other file has it",
        )


def _counts(recorded: object, found: Iterable[tuple[int | None, int]]) -> list[int]:
    """The number of experts of each MoE layer: as recorded, else as the files' names count to."""
    if type(recorded) is int:
        recorded = [recorded]
    if isinstance(recorded, (list, tuple)) and all(type(count) is int and count > 0 for count in recorded):
        if sum(recorded) > _MOST_EXPERTS:
            raise FormatError(f"the model states count {sum(recorded):,} experts, more than any model has")
        return list(recorded)
    highest: dict[int, int] = defaultdict(int)
    for layer, expert in found:
        highest[layer or 0] = max(highest[layer or 0], expert + 1)
    if max(highest, default=0) > _MOST_EXPERTS or sum(highest.values()) > _MOST_EXPERTS:
        raise FormatError("the files of experts count to more than any model has")
    return [highest[layer] for layer in range(max(highest) + 1)] if highest else []


def _file_name(layer: int | None, expert: int, model_rank: int) -> str:
    prefix = "" if layer is None else f"layer_{layer}_"
    return f"{prefix}expert_{expert}_mp_rank_{model_rank:02d}_model_states.pt"


def expert_partitions(ranks: int, partitions: int, ds_config: object) -> list[list[int]]:
    """Per expert-parallel rank, the data-parallel ranks that hold the partitions of its experts' group, in their order.

    ranks:      how many data-parallel ranks there are; partitions: `partition_count` of the group.
    ds_config:  the configuration that was saved. Raises FormatError where the numbers do not fit.
    """
    if partitions < 1 or ranks % partitions:
        raise FormatError(
            f"a group of experts has {partitions} partitions, which {ranks} data-parallel ranks do not hold"
        )
    expert_ranks = ranks // partitions
    if isinstance(ds_config, Mapping) and ds_config.get(_DATA_FIRST):
        return [[rank * partitions + part for part in range(partitions)] for rank in range(expert_ranks)]
    return [[part * expert_ranks + rank for part in range(partitions)] for rank in range(expert_ranks)]


def global_names(names: Iterable[str], expert_rank: int) -> dict[str, str]:
    """The names of one expert-parallel rank's parameters, in which experts count from zero → those in the whole layer.

    Other names stay as they are.
    """
    parsed = {name: _EXPERT.fullmatch(name) for name in names}
    local: dict[str, int] = defaultdict(int)
    for match in parsed.values():
        if match:
            local[match[1]] = max(local[match[1]], int(match[2]) + 1)
    return {
        name: f"{match[1]}{expert_rank * local[match[1]] + int(match[2])}{match[3]}" if match else name
        for name, match in parsed.items()
    }


def check_masters(masters: Iterable[str], stored: Collection[str]) -> Iterator[UnshardError]:
    """A problem where the optimizer has experts that no file has: then they are numbered in a way that is not known."""
    unknown = [name for name in masters if name not in stored]
    if unknown:
        yield IncompleteError(
            f"the optimizer has {len(unknown):,} parameters of experts that no file of an expert has, as "
            f"`{unknown[0]}`: its groups and these files are of different runs, or experts lie in an order that is not "
            "known",
            hint="--weights model takes the experts, and everything else, from the model states",
        )


def merge_files(states: Sequence[Mapping[str, Tensor]]) -> tuple[dict[str, Any], list[UnshardError]]:
    """The parameters of all files of experts of one model-parallel rank; what two files have is a problem."""
    merged: dict[str, Tensor] = {}
    twice = []
    for state in states:
        twice += [name for name in state if name in merged]
        merged |= state
    problems: list[UnshardError] = []
    if twice:
        problems.append(IncompleteError(f"several files of experts have the same parameters: {names_in_words(twice)}"))
    return merged, problems
