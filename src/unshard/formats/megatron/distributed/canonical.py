"""From the tensors of a distributed checkpoint, which are whole already, to the canonical catalog.

What is left to do: take the layer axis apart (`prepend_axis_num` of megatron-core's ShardedTensor), join what
`sharded_state_dict` stores in parts, name experts in one way and stack them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from unshard.errors import FormatError, IncompleteError, UnshardError
from unshard.formats.megatron.distributed.adapter_rows import restore_rows
from unshard.formats.megatron.distributed.keys import rename_experts, split_layers
from unshard.formats.megatron.experts import stack_experts
from unshard.formats.megatron.names import strip_wrappers
from unshard.formats.state_dict import MAX_ENTRIES
from unshard.tensors import Tensor, concat
from unshard.words import names_in_words

_MAX_PIECES = 2_000_000
"""Of all stacks of layers, when these are taken apart. Megatron saves each layer in pieces of its own, so that taking
them apart makes no more of them; the largest models come to a third of that."""
_HALVES = ("w", "v")
_QKV = ("query", "key", "value")
_PARTS: tuple[tuple[re.Pattern[str], tuple[str, ...], int], ...] = (
    (re.compile(r"(.+\.linear_fc1\.(?:.+\.)?weight)_([wv])"), _HALVES, -2),
    (re.compile(r"(.+\.linear_fc1\.(?:.+\.)?bias)_([wv])"), _HALVES, -1),
    (re.compile(r"(.+\.in_proj\.(?:weight|bias))\.(query|key|value|z|beta|alpha)"), (*_QKV, "z", "beta", "alpha"), 0),
    (re.compile(r"(.+\.conv1d\.(?:weight|bias))\.(query|key|value)"), _QKV, 0),
)
"""Keys of parts: pattern with the whole's name and the part's, the parts in order, and the axis on which they lie.

Gate and up of a gated MLP with `singleton_local_shards` and in `fsdp_dtensor` (megatron-core `transformer/mlp.py`,
`transformer/fsdp_dtensor_checkpoint.py`); sections of a gated delta net (`ssm/gated_delta_net.py`).
"""


def to_canonical(stored: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], Sequence[UnshardError]]:
    """The canonical tensors, and what is wrong with the stored ones."""
    problems: list[UnshardError] = []
    tensors = _join_parts(_take_layers_apart(stored, problems), problems)
    experts, wrong = stack_experts(restore_rows(tensors, problems))
    return experts, (*problems, *wrong)


def _take_layers_apart(stored: Mapping[str, Tensor], problems: list[UnshardError]) -> dict[str, Tensor]:
    """One tensor per global layer, without wrappers, experts by their canonical names."""
    tensors: dict[str, Tensor] = {}
    twice: list[str] = []
    depths: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    left = _MAX_PIECES

    def add(name: str, tensor: Tensor) -> None:
        if name in tensors:
            twice.append(name)
        tensors[name] = tensor.rename(name)

    for key, tensor in stored.items():
        name = rename_experts(strip_wrappers(key))
        stack = split_layers(name)
        left -= sum([chunk.box.sizes[0] for chunk in tensor.chunks]) if stack and tensor.shape else 0
        if stack is None:
            add(name, tensor)
        elif not tensor.shape:
            problems.append(FormatError(f"`{key}` should have a row per layer, but is a scalar"))
        elif len(tensors) + tensor.shape[0] > MAX_ENTRIES:
            problems.append(FormatError(f"`{key}`: {tensor.shape[0]:,} layers are too many to be true"))
        elif left < 0:
            problems.append(FormatError(f"`{key}`: with its layers there are over {_MAX_PIECES:,} pieces of tensors"))
        else:
            block, rest = stack
            depths[block][tensor.shape[0]].append(key)
            for number, layer in enumerate(tensor.unstack()):
                add(f"{block}.{number}.{rest}", layer)
    if twice:
        problems.append(FormatError(f"stored twice, under different keys: {names_in_words(twice)}"))
    problems += [_depths_differ(block, found) for block, found in depths.items() if len(found) > 1]
    return tensors


def _depths_differ(block: str, found: Mapping[int, Sequence[str]]) -> UnshardError:
    listed = "; ".join([f"{depth} in {names_in_words(keys)}" for depth, keys in sorted(found.items())])
    return IncompleteError(f"`{block}`: how many layers are there? {listed}")


def _join_parts(tensors: Mapping[str, Tensor], problems: list[UnshardError]) -> Mapping[str, Tensor]:
    """The tensors, parts of one tensor joined, where the first of them stood."""
    groups: dict[str, dict[str, Tensor]] = {}
    orders: dict[str, tuple[tuple[str, ...], int]] = {}
    for name, tensor in tensors.items():
        whole, part, order = _find_part(name)
        groups.setdefault(whole, {})[part] = tensor
        if order is not None:
            orders[whole] = order
    if not orders:
        return tensors
    joined: dict[str, Tensor] = {}
    for whole, parts in groups.items():
        if whole not in orders:
            joined[whole] = parts[""]
            continue
        expected, axis = orders[whole]
        if parts.keys() != set(expected):
            problems.append(_parts_differ(whole, list(parts), expected))
            continue
        try:
            joined[whole] = concat([parts[part] for part in expected], axis, name=whole)
        except ValueError as error:
            problems.append(IncompleteError(f"the parts of `{whole}` do not fit together: {error}"))
    return joined


def _find_part(name: str) -> tuple[str, str, tuple[tuple[str, ...], int] | None]:
    """The name of the whole, of the part ("" for the whole itself), and the parts in order with their axis."""
    for pattern, order, axis in _PARTS:
        if found := pattern.fullmatch(name):
            return found[1], found[2], (order, axis)
    return name, "", None


def _parts_differ(whole: str, parts: Sequence[str], order: Sequence[str]) -> UnshardError:
    if "" in parts:
        return FormatError(f"`{whole}` is stored twice, whole and in parts")
    missing = ", ".join([part for part in order if part not in parts])
    return IncompleteError(f"`{whole}` is stored in the parts {', '.join(order)}, of which there is no {missing}")
