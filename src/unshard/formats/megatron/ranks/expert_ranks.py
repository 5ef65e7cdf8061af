"""Which ranks share an expert, and which directories there must be.

Directories are named after the tensor rank t and the expert rank e of the process that wrote them. Megatron numbers the
processes of a pipeline stage twice: process r has tensor rank r % TP, expert tensor rank r % ETP and expert rank
(r // ETP) % EP. So not every pair (t, e) exists, and (t, e) tells the expert tensor rank. Source: megatron-core
`parallel_state.py` (`initialize_model_parallel`, order tp-cp-ep-dp-pp).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from math import lcm
from typing import Any

from unshard.errors import IncompleteError, UnshardError
from unshard.formats.megatron.ranks.sizes import (
    AS_IT_IS,
    ONE_RUN,
    Coordinates,
    Sizes,
    check_number,
    claim_in_words,
    size_in,
)
from unshard.words import items_in_words

_WIDTH = "moe_ffn_hidden_size"


def settle_expert_tensor(
    sizes: Sizes,
    facts: Mapping[str, Any],
    places: Sequence[Coordinates],
    columns: int | None,
    problems: list[UnshardError],
    told: Collection[str] = (),
) -> int:
    """How many ranks share one expert.

    columns: of an expert's second matrix on one rank, None where there are no experts. Told by args, by the width of
    the experts in args or else in config.json, by which directories exist, else as many as share dense layers,
    Megatron's default. Raises FormatError for more ranks than can be.
    """
    if columns is None:
        return sizes.tensor
    name = "expert_tensor_parallel_size"
    said, width = size_in(facts, name), size_in(facts, _WIDTH)
    in_config, width = (width, None) if _WIDTH in told else (None, width)
    shares = width // columns if width and columns and width % columns == 0 else None
    if said is not None and width is not None and shares != said:
        problems.append(
            IncompleteError(
                f"args.moe_ffn_hidden_size is {width} and {claim_in_words(name, said, told)}, but each rank holds "
                f"{columns} columns of an expert's linear_fc2",
                hint=AS_IT_IS if name in told else ONE_RUN,
            )
        )
    there = {(place.tensor, place.expert) for place in places}
    if said is not None and name in told:
        problems += _check_pairs(sizes, said, there)
    if said is not None or shares is not None:
        size = said or shares or 1
        check_number(lcm(sizes.tensor, size * sizes.expert), sizes)
        return size
    if in_config and columns and in_config % columns == 0 and sizes.tensor % (in_config // columns) == 0:
        return in_config // columns
    if len(there) < sizes.tensor * sizes.expert:
        for size in [size for size in range(1, sizes.tensor) if sizes.tensor % size == 0]:
            if set(expert_tensor_ranks(sizes, size)) == there:
                return size
    return sizes.tensor


def _check_pairs(sizes: Sizes, expert_tensor: int, there: Collection[tuple[int, int]]) -> Iterable[UnshardError]:
    """A problem where directories are there that no process would have written."""
    check_number(lcm(sizes.tensor, expert_tensor * sizes.expert), sizes)
    expected = expert_tensor_ranks(sizes, expert_tensor)
    others = [f"{tensor} and {expert}" for tensor, expert in sorted(there) if (tensor, expert) not in expected]
    if others:
        yield IncompleteError(
            f"--parallel says etp={expert_tensor}, but then no process has the tensor and expert ranks "
            f"{items_in_words(others)}, whose directories are there",
            hint=AS_IT_IS,
        )


@cache
def expert_tensor_ranks(sizes: Sizes, expert_tensor: int) -> dict[tuple[int, int], set[int]]:
    """(tensor rank, expert rank) of the directories that exist → the expert tensor ranks of their processes."""
    found: dict[tuple[int, int], set[int]] = defaultdict(set)
    for process in range(lcm(sizes.tensor, expert_tensor * sizes.expert)):
        expert = process // expert_tensor % sizes.expert
        found[process % sizes.tensor, expert].add(process % expert_tensor)
    return dict(found)


def expert_tensor_rank(sizes: Sizes, expert_tensor: int, place: Coordinates) -> int:
    """Which of the ranks that share an expert wrote a directory."""
    pair = place.tensor, place.expert
    return min(expert_tensor_ranks(sizes, expert_tensor).get(pair, {place.tensor % expert_tensor}))


def check_collisions(sizes: Sizes, expert_tensor: int) -> Iterable[UnshardError]:
    """A problem where several processes had the same directory, and overwrote each other's experts."""
    if any(len(ranks) > 1 for ranks in expert_tensor_ranks(sizes, expert_tensor).values()):
        yield IncompleteError(
            f"{expert_tensor} ranks share each expert, but {sizes.tensor} each dense layer: directories are named "
            "after the latter, so that several ranks wrote into the same one, and shards of experts are lost",
            hint="save again with --ckpt-format torch_dist, or with --expert-tensor-parallel-size that divides "
            "--tensor-model-parallel-size",
        )


def missing_directories(sizes: Sizes, places: Sequence[Coordinates], expert_tensor: int | None) -> list[str]:
    """The names of directories whose shards no other directory holds. `expert_tensor`: None without experts."""
    missing: list[str] = []
    expected = sorted(expert_tensor_ranks(sizes, expert_tensor or sizes.tensor))
    for pipeline in range(sizes.pipeline):
        there = {(place.tensor, place.expert) for place in places if place.pipeline == pipeline}
        tensors = {tensor for tensor, _ in there}
        shards = {shard for pair in there for shard in _expert_shards(sizes, expert_tensor, pair)}
        missing += [
            _directory_name(sizes, pair[0], pipeline, pair[1])
            for pair in expected
            if pair[0] not in tensors or not _expert_shards(sizes, expert_tensor, pair) <= shards
        ]
    return missing


def _expert_shards(sizes: Sizes, expert_tensor: int | None, pair: tuple[int, int]) -> set[tuple[int, int]]:
    """(expert tensor rank, expert rank) of the shards of experts in a directory of (tensor rank, expert rank)."""
    if expert_tensor is None:
        return set()
    return {(rank, pair[1]) for rank in expert_tensor_ranks(sizes, expert_tensor).get(pair, {pair[0] % expert_tensor})}


def _directory_name(sizes: Sizes, tensor: int, pipeline: int, expert: int) -> str:
    name = f"mp_rank_{tensor:02d}" + (f"_{pipeline:03d}" if sizes.pipeline > 1 else "")
    return name + (f"_{expert:03d}" if sizes.expert > 1 else "")
