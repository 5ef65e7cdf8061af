"""The `torch_dist` backend: a DCP directory, whose keys are megatron-core's own.

Facts: megatron-core `dist_checkpointing/strategies/torch.py`; for flattened tensors `resharding.py` beside it, before
megatron-core 0.14.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from math import prod
from typing import Any

from unshard.errors import FormatError
from unshard.formats.contract import Source
from unshard.formats.dcp.container import read_container
from unshard.formats.dcp.directory import Folder
from unshard.formats.megatron.distributed.stored import Stored
from unshard.tensors import Tensor

_RECORDED_SHAPE = "nd_reformulated_orig_global_shape"


def read_torch_dist(source: Source, wanted: Callable[[str], bool]) -> Stored:
    """The tensors of a DCP directory, whose files may also lie in the source's further roots.

    `wanted` says of a key whether its tensor is to be read. Raises what `read_container` raises.
    """
    (root, directory), *others = source.roots.items()
    also = [Folder(path, name) for name, path in others]
    container = read_container(directory, root, wanted=wanted, also=also)
    found = Stored(
        dict(container.tensors),
        [*container.skipped, *container.items],
        container.items,
        list(container.problems),
        list(container.notes),
    )
    recorded = container.extra.get("mcore_data")
    for key, facts in recorded.items() if isinstance(recorded, Mapping) else ():
        shape = facts.get(_RECORDED_SHAPE) if isinstance(facts, Mapping) else None
        if shape is not None and key in found.tensors:
            try:
                found.tensors[key] = restore_shape(found.tensors[key], shape)
            except FormatError as error:
                found.problems.append(error)
                del found.tensors[key]
    return found


def restore_shape(tensor: Tensor, shape: Any) -> Tensor:
    """A flattened tensor in the shape that it had.

    Where ranks save flat ranges of their shards, a tensor [X, Y] cut into shards [x, y] is stored as [X/x, Y/y, x*y].
    Raises FormatError where that does not fit `shape`, as `.metadata` records it.
    """
    grid = tensor.shape[:-1]
    sizes = tuple(shape) if isinstance(shape, (list, tuple)) else ()
    fits = len(sizes) == len(grid) and all(
        type(size) is int and count > 0 and size % count == 0 for size, count in zip(sizes, grid, strict=True)
    )
    if not fits or prod(sizes) != tensor.size:
        raise FormatError(f"`{tensor.name}`: a flattened tensor of {list(tensor.shape)} cannot have been {shape!r}")
    shard = [size // count for size, count in zip(sizes, grid, strict=True)]
    axes = len(grid)
    order = chain.from_iterable([(axis, axes + axis) for axis in range(axes)])
    return tensor.reshape((*grid, *shard)).transpose(tuple(order)).reshape(sizes)
