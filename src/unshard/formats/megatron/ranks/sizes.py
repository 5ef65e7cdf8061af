"""How many ranks of each kind there are, and which of them a directory holds.

Directories are named after the tensor rank t and the expert rank e of the process that wrote them. Megatron numbers the
processes of a pipeline stage twice: process r has tensor rank r % TP, expert tensor rank r % ETP and expert rank
(r // ETP) % EP. So not every pair (t, e) exists, and (t, e) tells the expert tensor rank. Source: megatron-core
`parallel_state.py` (`initialize_model_parallel`, order tp-cp-ep-dp-pp).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import lcm
from typing import Any

from unshard.errors import FormatError, IncompleteError, UnshardError
from unshard.formats.megatron.ranks.contents import RankContent
from unshard.formats.megatron.ranks.local_experts import is_expert
from unshard.parallel import ARGUMENTS
from unshard.words import count_in_words, items_in_words

_AS_IT_IS = "correct --parallel, or leave it out: names and files tell"
ONE_RUN = "files of different runs are mixed, or args were changed: bring together the files of one run"
_MAX_RANKS = 1 << 16
_WIDTH = "moe_ffn_hidden_size"
_COMPARED = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "ffn_hidden_size",
    "num_experts",
    "padded_vocab_size",
)
"""Arguments in which the ranks of one checkpoint agree."""


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Which rank of each kind wrote a directory."""

    tensor: int
    pipeline: int
    expert: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many ranks of each kind; `virtual` is the number of stages per pipeline rank."""

    tensor: int
    pipeline: int
    virtual: int
    expert: int

    def mesh(self, expert_tensor: int) -> tuple[tuple[str, int], ...]:
        """The kinds with more than one rank. `etp` is told where it is not that of dense layers."""
        sizes = {"tp": self.tensor, "pp": self.pipeline, "vpp": self.virtual, "ep": self.expert}
        dims = tuple([(kind, size) for kind, size in sizes.items() if size > 1])
        return dims if expert_tensor == self.tensor else (*dims, ("etp", expert_tensor))


def check_one_run(contents: Sequence[RankContent]) -> Iterable[UnshardError]:
    """Problems of ranks that were saved at different steps, or by runs of different shape."""
    steps = _by_value(contents, [content.iteration for content in contents])
    if len(steps) > 1:
        listed = "; ".join([f"iteration {step}: {_names(ranks)}" for step, ranks in steps.items()])
        hint = "bring together the files of one step; the others belong to another directory iter_*"
        yield IncompleteError(f"the ranks were saved at different steps: {listed}", hint=hint)
    for name in _COMPARED:
        values = _by_value(contents, [content.facts.get(name) for content in contents])
        if len(values) > 1:
            listed = "; ".join([f"{value}: {_names(ranks)}" for value, ranks in values.items()])
            yield IncompleteError(f"the ranks disagree on args.{name}: {listed}", hint=ONE_RUN)


def _by_value(contents: Sequence[RankContent], values: Sequence[Any]) -> dict[str, list[RankContent]]:
    """The ranks by a value, as text; ranks that have none are not asked."""
    groups: dict[str, list[RankContent]] = defaultdict(list)
    for content, value in zip(contents, values, strict=True):
        if value is not None:
            groups[str(value)].append(content)
    return groups


def settle_sizes(
    contents: Sequence[RankContent],
    facts: Mapping[str, Any],
    problems: list[UnshardError],
    told: Collection[str] = (),
) -> tuple[Sizes, list[Coordinates]]:
    """The sizes, and the coordinates of each rank; what contradicts is added to `problems`.

    Args say; names must agree. A single further number in the names is told by args, else by what the ranks hold.
    `told`: names of facts that come from the user, not from args. Raises FormatError for more ranks than can be.
    """
    depths = {len(content.directory.numbers) for content in contents}
    if len(depths) > 1:
        examples = [next(c.directory.name for c in contents if len(c.directory.numbers) == d) for d in sorted(depths)]
        problems.append(
            IncompleteError(f"rank directories of different layouts are mixed: {', '.join(examples)}", hint=ONE_RUN)
        )
    is_expert_number = _is_expert_number(contents, facts, problems, told) if depths == {1} else False
    places = [_place(content, is_expert_number) for content in contents]
    sizes = Sizes(
        _settle("tensor_model_parallel_size", facts, [place.tensor for place in places], problems, told),
        _settle("pipeline_model_parallel_size", facts, [place.pipeline for place in places], problems, told),
        _settle_chunks(contents, facts, problems, told),
        _settle("expert_model_parallel_size", facts, [place.expert for place in places], problems, told),
    )
    _check_number(lcm(sizes.tensor, sizes.expert) * sizes.pipeline * sizes.virtual, sizes)
    return sizes, places


def _check_number(ranks: int, sizes: Sizes) -> None:
    """Raise FormatError where names or args count to more ranks than can be."""
    if ranks > _MAX_RANKS:
        raise FormatError(
            f"args or the directories' names count to {sizes.tensor:,} tensor-, {sizes.pipeline:,} pipeline- and "
            f"{sizes.expert:,} expert-parallel ranks, more than any cluster has"
        )


def _place(content: RankContent, is_expert_number: bool) -> Coordinates:
    numbers = content.directory.numbers
    if len(numbers) == 1 and is_expert_number:
        return Coordinates(content.directory.tensor, 0, numbers[0])
    return Coordinates(content.directory.tensor, *[*numbers, 0, 0][:2])


def _is_expert_number(
    contents: Sequence[RankContent], facts: Mapping[str, Any], problems: list[UnshardError], told: Collection[str]
) -> bool:
    """Whether the only number after the tensor rank is an expert rank, not a pipeline rank.

    Args say, or the user does, whom the files must not contradict; else the files tell.
    """
    kinds = {True: "expert_model_parallel_size", False: "pipeline_model_parallel_size"}
    sizes = {is_expert: _size(facts, name) or 1 for is_expert, name in kinds.items()}
    if max(sizes.values()) == 1:
        return _look_like_expert_ranks(contents)
    is_expert = sizes[False] == 1
    several = len({content.directory.numbers for content in contents}) > 1
    if several and kinds[is_expert] in told and is_expert != _look_like_expert_ranks(contents):
        held, kind = ("different", "pipeline") if is_expert else ("the same", "expert")
        claim = _claim(kinds[is_expert], sizes[is_expert], told)
        ranks = f"{_names(contents)} hold {held} dense parameters, as {kind}-parallel ranks do"
        problems.append(IncompleteError(f"{claim}, but {ranks}", hint=_AS_IT_IS))
    return is_expert


def _look_like_expert_ranks(contents: Sequence[RankContent]) -> bool:
    """Whether directories hold the same parameters but for the experts; of pipeline ranks, one has the embedding."""
    dense: dict[int, dict[str, tuple[int, ...]]] = {}
    for content in contents:
        tensors = [item for model in content.models for item in model.items() if not is_expert(item[0])]
        dense.setdefault(content.directory.numbers[-1], {}).update({name: tensor.shape for name, tensor in tensors})
    has_experts = any(is_expert(name) for name in contents[0].names)
    return has_experts and len(dense) > 1 and all(shapes == dense[min(dense)] for shapes in dense.values())


def _claim(name: str, size: int, told: Collection[str]) -> str:
    """A size with who says it: "args.tensor_model_parallel_size is 2", "--parallel says tp=2"."""
    kind = next((kind for kind, argument in ARGUMENTS.items() if argument == name), name)
    return f"--parallel says {kind}={size}" if name in told else f"args.{name} is {size}"


def _settle(
    name: str,
    facts: Mapping[str, Any],
    ranks: Sequence[int],
    problems: list[UnshardError],
    told: Collection[str],
) -> int:
    """The number of ranks of a kind: as args say, else as many as the names count to."""
    named, said = max(ranks) + 1, _size(facts, name)
    if said is not None and named > said:
        problems.append(
            IncompleteError(
                f"{_claim(name, said, told)}, but the directories' names count to {named} such ranks",
                hint=_AS_IT_IS if name in told else ONE_RUN,
            )
        )
    return max(named, said or 1)


def _settle_chunks(
    contents: Sequence[RankContent], facts: Mapping[str, Any], problems: list[UnshardError], told: Collection[str]
) -> int:
    counts = _by_value(contents, [len(content.models) for content in contents])
    if len(counts) > 1:
        listed = "; ".join([f"{count}: {_names(ranks)}" for count, ranks in counts.items()])
        problems.append(IncompleteError(f"the ranks hold different numbers of virtual stages: {listed}", hint=ONE_RUN))
    name = "virtual_pipeline_model_parallel_size"
    said, found = _size(facts, name), max(len(content.models) for content in contents)
    if said is not None and said != found:
        stages = count_in_words(found, "virtual stage")
        problems.append(
            IncompleteError(
                f"{_claim(name, said, told)}, but the files hold {stages}",
                hint=_AS_IT_IS if name in told else ONE_RUN,
            )
        )
    return found


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
    said, width = _size(facts, name), _size(facts, _WIDTH)
    in_config, width = (width, None) if _WIDTH in told else (None, width)
    shares = width // columns if width and columns and width % columns == 0 else None
    if said is not None and width is not None and shares != said:
        problems.append(
            IncompleteError(
                f"args.moe_ffn_hidden_size is {width} and {_claim(name, said, told)}, but each rank holds {columns} "
                "columns of an expert's linear_fc2",
                hint=_AS_IT_IS if name in told else ONE_RUN,
            )
        )
    there = {(place.tensor, place.expert) for place in places}
    if said is not None and name in told:
        problems += _check_pairs(sizes, said, there)
    if said is not None or shares is not None:
        size = said or shares or 1
        _check_number(lcm(sizes.tensor, size * sizes.expert), sizes)
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
    _check_number(lcm(sizes.tensor, expert_tensor * sizes.expert), sizes)
    expected = expert_tensor_ranks(sizes, expert_tensor)
    others = [f"{tensor} and {expert}" for tensor, expert in sorted(there) if (tensor, expert) not in expected]
    if others:
        yield IncompleteError(
            f"--parallel says etp={expert_tensor}, but then no process has the tensor and expert ranks "
            f"{items_in_words(others)}, whose directories are there",
            hint=_AS_IT_IS,
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


def _size(facts: Mapping[str, Any], name: str) -> int | None:
    value = facts.get(name)
    if value is None and name == "tensor_model_parallel_size":
        value = facts.get("model_parallel_size")
    return value if type(value) is int and value > 0 else None


def _names(contents: Sequence[RankContent]) -> str:
    return items_in_words([content.directory.name for content in contents], 4)
