"""The experts that one rank holds, each by itself and under its global number, whatever implementation trained them.

| implementation | stored name                                       | shape on a rank                         |
|----------------|---------------------------------------------------|-----------------------------------------|
| SequentialMLP  | `experts.local_experts.{local}.linear_fc1.weight` | [2F / ETP, h]                           |
| TEGroupedMLP   | `experts.linear_fc1.weight{local}`                | [2F / ETP, h]                           |
| … in one piece | `experts.linear_fc1.weight`                       | [E / EP, 2F / ETP, h]                   |
| GroupedMLP     | `experts.weight1`                                 | memory of [E / EP, h, 2F / ETP]         |
|                | `experts.weight2`                                 | memory of [E / EP, F / ETP, h]          |

GroupedMLP's parameters are declared [h, E / EP * 2F / ETP] and [E / EP * F / ETP, h]; what counts is how its forward
pass views them. Sources: megatron-core 0.16 `transformer/moe/experts.py`, `extensions/transformer_engine.py`;
Megatron-Bridge `peft/utils.py` for adapters (one of all experts of a rank, or one of each, stacked).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from unshard.errors import FormatError
from unshard.tensors import Tensor

_MAX_EXPERTS = 1 << 16
_EXPERT = re.compile(r"(?:.*\.)?experts\..+")
_SEQUENTIAL = re.compile(r"(.*\bexperts)\.local_experts\.(\d{1,6})\.(.+)")
_GROUPED_TE = re.compile(r"(.*\bexperts)\.(linear_fc[12]\.(?:weight|bias))(\d{1,6})")
_GROUPED = re.compile(r"(.*\bexperts)\.weight([12])")
_TOGETHER = re.compile(r"(.*\bexperts)\.(linear_fc[12]\.(?:.+\.)?(?:weight|bias))")


def is_expert(name: str) -> bool:
    """Whether a name is one of routed experts: they are cut by the expert tensor-parallel ranks."""
    return _EXPERT.fullmatch(name) is not None


def name_experts(
    model: Mapping[str, Tensor], rank: int, ranks: int, experts: int | None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a stage on expert rank `rank` of `ranks`, experts as `….local_experts.{global}.linear_fc1.weight`.

    experts: how many there are in all, where a router does not tell. Raises FormatError where nothing tells, and for
    shapes that do not fit.
    """
    counts: dict[str, int] = {}
    for name, tensor in model.items():
        if not is_expert(name):
            yield name, tensor
            continue
        module = _module_of(name)
        if module not in counts:
            counts[module] = _count_local(model, module, ranks, experts)
        first = rank * counts[module]
        for number, rest, one in _take_apart(name, tensor, counts[module]):
            full = f"{module}.local_experts.{first + number}.{rest}"
            yield full, one.rename(full)


def _module_of(name: str) -> str:
    """`decoder.layers.0.mlp.experts` of a name of experts."""
    return name[
        : name.index("experts.", 0 if name.startswith("experts.") else name.index(".experts.")) + len("experts")
    ]


def _count_local(model: Mapping[str, Tensor], module: str, ranks: int, experts: int | None) -> int:
    """The number of experts on this rank: its share of the router's, lest missing ones go unseen; else what it has."""
    numbers = [int(match[2]) for name in model if (match := _SEQUENTIAL.fullmatch(name)) and match[1] == module]
    numbers += [int(match[3]) for name in model if (match := _GROUPED_TE.fullmatch(name)) and match[1] == module]
    router = model.get(f"{module.removesuffix('experts')}router.weight")
    total = router.shape[0] if router is not None and router.shape else experts
    held = max(numbers, default=-1) + 1
    if held and (total is None or total % ranks or total > _MAX_EXPERTS or total // ranks < held):
        return held
    if total is None or total > _MAX_EXPERTS:
        raise FormatError(f"`{module}`: neither a router nor args tell how many experts there are")
    if total % ranks:
        raise FormatError(f"`{module}`: {total} experts do not lie evenly on {ranks} expert-parallel ranks")
    return total // ranks


def _take_apart(name: str, tensor: Tensor, count: int) -> Sequence[tuple[int, str, Tensor]]:
    """(local number, name below the expert, its tensor) of each expert in a stored tensor."""
    if match := _SEQUENTIAL.fullmatch(name) or _GROUPED_TE.fullmatch(name):
        number, rest = (match[2], match[3]) if "local_experts" in name else (match[3], match[2])
        return [(int(number), rest, tensor)]
    try:
        if match := _GROUPED.fullmatch(name):
            return [(n, f"linear_fc{match[2]}.weight", one) for n, one in enumerate(_regroup(tensor, match[2], count))]
        if match := _TOGETHER.fullmatch(name):
            return [(n, match[2], one) for n, one in enumerate(_each(match[2], tensor, count))]
    except ValueError as error:
        raise FormatError(f"`{name}` of shape {tensor.shape} is not that of {count} experts: {error}") from None
    raise FormatError(f"`{name}` is no parameter of experts that is known")


def _regroup(tensor: Tensor, which: str, count: int) -> tuple[Tensor, ...]:
    """The experts' matrices [out, in] in the memory of GroupedMLP's `weight1` or `weight2`."""
    if tensor.ndim != 2 or not tensor.size:
        raise ValueError("expected two axes")
    hidden = tensor.shape[0] if which == "1" else tensor.shape[1]
    inner = tensor.size // (count * hidden)
    shape = (count, hidden, inner) if which == "1" else (count, inner, hidden)
    return tensor.reshape(shape).transpose().unstack()


def _each(rest: str, tensor: Tensor, count: int) -> tuple[Tensor, ...]:
    """The experts of a stack; an adapter without an axis of experts serves all of them."""
    one = 1 if rest.endswith("bias") else 2
    if tensor.ndim == one and ".adapter." in rest:
        return (tensor,) * count
    if tensor.ndim != one + 1 or tensor.shape[0] != count:
        raise ValueError(f"expected an axis of {count} before {one} others")
    return tensor.unstack()
