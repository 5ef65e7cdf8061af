"""How many ranks of each kind there are, and which of them a directory holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from unshard.errors import FormatError, IncompleteError, UnshardError
from unshard.formats.megatron.ranks.contents import RankContent
from unshard.formats.megatron.ranks.local_experts import is_expert
from unshard.parallel import ARGUMENTS
from unshard.words import count_in_words, items_in_words

AS_IT_IS = "correct --parallel, or leave it out: names and files tell"
ONE_RUN = "files of different runs are mixed, or args were changed: bring together the files of one run"
_MAX_RANKS = 1 << 16
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
    check_number(lcm(sizes.tensor, sizes.expert) * sizes.pipeline * sizes.virtual, sizes)
    return sizes, places


def check_number(ranks: int, sizes: Sizes) -> None:
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
    sizes = {is_expert: size_in(facts, name) or 1 for is_expert, name in kinds.items()}
    if max(sizes.values()) == 1:
        return _look_like_expert_ranks(contents)
    is_expert = sizes[False] == 1
    several = len({content.directory.numbers for content in contents}) > 1
    if several and kinds[is_expert] in told and is_expert != _look_like_expert_ranks(contents):
        held, kind = ("different", "pipeline") if is_expert else ("the same", "expert")
        claim = claim_in_words(kinds[is_expert], sizes[is_expert], told)
        ranks = f"{_names(contents)} hold {held} dense parameters, as {kind}-parallel ranks do"
        problems.append(IncompleteError(f"{claim}, but {ranks}", hint=AS_IT_IS))
    return is_expert


def _look_like_expert_ranks(contents: Sequence[RankContent]) -> bool:
    """Whether directories hold the same parameters but for the experts; of pipeline ranks, one has the embedding."""
    dense: dict[int, dict[str, tuple[int, ...]]] = {}
    for content in contents:
        tensors = [item for model in content.models for item in model.items() if not is_expert(item[0])]
        dense.setdefault(content.directory.numbers[-1], {}).update({name: tensor.shape for name, tensor in tensors})
    has_experts = any(is_expert(name) for name in contents[0].names)
    return has_experts and len(dense) > 1 and all(shapes == dense[min(dense)] for shapes in dense.values())


def claim_in_words(name: str, size: int, told: Collection[str]) -> str:
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
    named, said = max(ranks) + 1, size_in(facts, name)
    if said is not None and named > said:
        problems.append(
            IncompleteError(
                f"{claim_in_words(name, said, told)}, but the directories' names count to {named} such ranks",
                hint=AS_IT_IS if name in told else ONE_RUN,
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
    said, found = size_in(facts, name), max(len(content.models) for content in contents)
    if said is not None and said != found:
        stages = count_in_words(found, "virtual stage")
        problems.append(
            IncompleteError(
                f"{claim_in_words(name, said, told)}, but the files hold {stages}",
                hint=AS_IT_IS if name in told else ONE_RUN,
            )
        )
    return found


def size_in(facts: Mapping[str, Any], name: str) -> int | None:
    """A size that was recorded, if it is one; the oldest releases had another name for the tensor-parallel one."""
    value = facts.get(name)
    if value is None and name == "tensor_model_parallel_size":
        value = facts.get("model_parallel_size")
    return value if type(value) is int and value > 0 else None


def _names(contents: Sequence[RankContent]) -> str:
    return items_in_words([content.directory.name for content in contents], 4)
