"""Rows of adapters that a distributed checkpoint holds in another order than the matrix that they adapt.

Megatron-core puts the rows of fused matrices in their true order when it saves. Megatron-Bridge does so for most of its
adapters, but not for these, where training was tensor-parallel (`src/megatron/bridge/peft/`, `dora_layers.py` for the
first, `utils.py` for the others):

| tensor                                                   | its rows are stored as                           |
|----------------------------------------------------------|--------------------------------------------------|
| `linear_fc1.adapter.weight_magnitude` (DoRA)             | gates and ups of the first rank, of the next, …  |
| `linear_fc1.adapter.adapter_{gate,up}.linear_out.weight` | first halves of all ranks, then the second ones  |
| `in_proj.adapter.linear_out.weight` (gated delta net)    | all sections of the first rank, of the next, …   |

The second is the order that `apply_swiglu_sharded_factory` gives to what it takes for gate and up. How many ranks there
were is told by the chunks: each rank saved its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from unshard.errors import FormatError, UnshardError
from unshard.formats.megatron.sections import delta_net_sizes, join_gated, join_sections
from unshard.tensors import Tensor, concat

_HALVES = re.compile(r".+\.linear_fc1\.adapter\.adapter_(?:gate|up)\.linear_out\.weight")
_MAGNITUDE = re.compile(r"(.+\.linear_fc1\.adapter)\.weight_magnitude")
_SECTIONS = re.compile(r"(.+\.)in_proj\.adapter\.linear_out\.weight")


def restore_rows(tensors: Mapping[str, Tensor], problems: list[UnshardError]) -> Mapping[str, Tensor]:
    """The tensors, adapters' rows in the order of what they adapt. What cannot be told is added to `problems`."""
    return {name: _restore(name, tensor, tensors, problems) for name, tensor in tensors.items()}


def _restore(name: str, tensor: Tensor, tensors: Mapping[str, Tensor], problems: list[UnshardError]) -> Tensor:
    if ".adapter." not in name:
        return tensor
    try:
        return _reorder(name, tensor, tensors)
    except ValueError as error:
        problems.append(FormatError(f"`{name}`: {error}"))
        return tensor


def _reorder(name: str, tensor: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """Raises ValueError where nothing tells how the ranks' rows lie."""
    if _HALVES.fullmatch(name):
        return _join_halves(tensor)
    if found := _MAGNITUDE.fullmatch(name):
        rows = tensors.get(f"{found[1]}.linear_out.weight")
        shards = _shards(tensor, -1)
        gated = rows is not None and len(_shards(rows, -2)) == 2 * len(shards)
        return join_gated(shards, -1) if gated else tensor
    if found := _SECTIONS.fullmatch(name):
        shards = _shards(tensor, -2)
        return join_sections(shards, -2, _delta_net(found[1], shards, tensors)) if len(shards) > 1 else tensor
    return tensor


def _join_halves(tensor: Tensor) -> Tensor:
    """The rows of each rank together, stored as the first halves of all ranks and then the second halves."""
    shards = _shards(tensor, -2)
    ranks, odd = divmod(len(shards), 2)
    if odd and ranks:
        raise ValueError(f"{len(shards)} pieces are no two halves of the rows of each rank")
    return concat([shard for rank in range(ranks) for shard in shards[rank::ranks]], -2) if ranks > 1 else tensor


def _delta_net(module: str, shards: Sequence[Tensor], tensors: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Rows of each section in one rank's shard of a delta net's `in_proj`. ValueError where nothing tells them."""
    output = tensors.get(f"{module}out_proj.weight") or tensors.get(f"{module}out_proj.adapter.linear_in.weight")
    heads = tensors.get(f"{module}A_log")
    if output is None or heads is None:
        raise ValueError(
            f"{len(shards)} ranks share its rows, and without the weights of `{module.rstrip('.')}` nothing tells how"
        )
    ranks = len(shards)
    return delta_net_sizes(shards[0].shape[-2], output.shape[-1] // ranks, heads.shape[0] // ranks)


def _shards(tensor: Tensor, axis: int) -> Sequence[Tensor]:
    """The pieces in which the ranks saved a tensor along an axis; the tensor itself where nothing shows them.

    Raises ValueError for pieces of different sizes: each rank saves as much as the others.
    """
    axis += tensor.ndim
    if axis < 0 or len(tensor.factors[axis]) != 1:
        return (tensor,)
    place = sum(len(group) for group in tensor.factors[:axis])
    starts = sorted({chunk.box.offsets[place] for chunk in tensor.chunks})
    each = tensor.shape[axis] // max(len(starts), 1)
    if starts != list(range(0, each * len(starts), each or 1)) or each * len(starts) != tensor.shape[axis]:
        raise ValueError(f"pieces begin at rows {starts} of {tensor.shape[axis]}, which are no equal shares of ranks")
    return tensor.split(axis, [each] * len(starts))
