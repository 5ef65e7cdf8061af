"""The device mesh that a DTensor remembers, read from the inert record of every torch since 2.1.

State keys (torch `distributed/device_mesh.py` of each release):

* up to 2.9: `mesh` (an integer tensor of ranks, one axis per mesh dimension), `mesh_dim_names`, `_coordinate_on_dim`,
  and from 2.2 on `_flatten_mesh_list`, the same ranks as plain integers;
* from 2.10: `_layout` (sizes and strides per dimension), `_rank_map` and `_flatten_rank_map` (the ranks of the root
  mesh), `_mesh_dim_names`, `_coordinate_on_dim`, from 2.11 `_rank`.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from unshard.errors import FormatError
from unshard.files import OpenFiles
from unshard.formats.torch_file.records import Opaque, StoredTensor
from unshard.tensors import row_major_strides

MAX_DIMS = 64
"""Dimensions of a mesh, and sizes that one of them was flattened from; torch's tensors have no more either."""
_MAX_NESTING = 3
_MAX_RANKS = 1 << 20
_ROOTS = ("_root_mesh", "_parent_mesh")
_RANK_LISTS = ("_flatten_rank_map", "_flatten_mesh_list")
_INTEGERS = {"I64": "q", "I32": "i"}


@dataclass(frozen=True, slots=True)
class Mesh:
    """A device mesh as one rank saw it.

    names:      of its dimensions; `dim0`, `dim1`, … where it had none.
    sizes:      of its dimensions.
    coordinate: of the rank that saved it.
    rank:       the global rank at that coordinate, or None where the file does not tell.
    world_size: ranks of the root mesh, or None where the file does not tell.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]
    rank: int | None
    world_size: int | None

    @property
    def dims(self) -> tuple[tuple[str, int], ...]:
        return tuple(zip(self.names, self.sizes, strict=True))


def read_mesh(record: Any, roots: Mapping[str, Path], rank: int | None) -> Mesh:
    """The mesh of a `DeviceMesh` record. `rank` is the one that the file is named after, used where nothing else tells.

    `roots` are the places of the source files: torch up to 2.9 keeps the ranks in a tensor, whose few bytes are read.
    Raises FormatError where the record is not a mesh, or does not say where in it the rank stood.
    """
    if not isinstance(record, Opaque) or record.cls.name != "DeviceMesh" or not isinstance(record.state, dict):
        raise FormatError("a DTensor without a device mesh")
    if "_layout" in record.state:
        sizes, ranks = _read_layout(record)
        names = record.get("_mesh_dim_names")
    else:
        sizes, ranks = _read_mesh_tensor(record, roots)
        names = record.get("mesh_dim_names")
    coordinate = _read_coordinate(record, sizes, ranks, rank)
    names = tuple([name for name in names if isinstance(name, str)]) if isinstance(names, (tuple, list)) else ()
    if len(names) != len(sizes):
        names = tuple([f"dim{number}" for number in range(len(sizes))])
    here = record.get("_rank")
    if not isinstance(here, int):
        here = _rank_at(record, sizes, ranks, coordinate)
    return Mesh(names, sizes, coordinate, here, _world_size(record, ranks))


def _read_layout(record: Opaque) -> tuple[tuple[int, ...], Sequence[int]]:
    """Sizes and root ranks of a mesh of torch >= 2.10.

    Dimensions made by flattening others have a tuple of sizes; from 2.13 each dimension is a `_FlatLayout` of its own.
    """
    layout = record.get("_layout")
    if not isinstance(layout, Opaque):
        raise FormatError("a device mesh without a layout")
    axes = layout.get("axes")
    if isinstance(axes, (tuple, list)):
        shapes = [axis.get("shape", ()) if isinstance(axis, Opaque) else None for axis in axes]
    else:
        shape = layout.get("shape", ())
        shapes = list(shape) if isinstance(shape, tuple) else [shape]
    if len(shapes) > MAX_DIMS:
        raise FormatError(f"a device mesh of {len(shapes)} dimensions")
    return tuple([_volume(shape) for shape in shapes]), _integers(record.get("_flatten_rank_map"))


def _read_mesh_tensor(record: Opaque, roots: Mapping[str, Path]) -> tuple[tuple[int, ...], Sequence[int]]:
    """Sizes and ranks of a mesh of torch <= 2.9."""
    mesh = record.get("mesh")
    if not isinstance(mesh, StoredTensor):
        raise FormatError("a device mesh without its ranks")
    ranks = _integers(record.get("_flatten_mesh_list"))
    if len(ranks) != prod(mesh.shape):
        ranks = _read_integers(mesh, roots)
    return mesh.shape, ranks


def _read_coordinate(record: Opaque, sizes: tuple[int, ...], ranks: Sequence[int], rank: int | None) -> tuple[int, ...]:
    """Where in the mesh the rank stood: as it recorded it itself, or else where the ranks list it."""
    recorded = record.get("_coordinate_on_dim")
    if recorded is not None:
        coordinate = tuple(_integers(recorded))
        if len(coordinate) != len(sizes) or not all(0 <= a < b for a, b in zip(coordinate, sizes, strict=True)):
            raise FormatError(f"coordinate {coordinate} is outside a device mesh of {sizes}")
        return coordinate
    if "_coordinate_on_dim" in record.state or rank not in ranks or len(ranks) != prod(sizes):
        raise FormatError(f"the rank does not belong to its tensor's device mesh of {sizes}")
    place, coordinate = ranks.index(rank), ()
    for size in reversed(sizes):
        coordinate = (place % size, *coordinate)
        place //= size
    return coordinate


def _rank_at(record: Opaque, sizes: tuple[int, ...], ranks: Sequence[int], coordinate: tuple[int, ...]) -> int | None:
    """The rank at a coordinate of a whole mesh; None for one that was sliced out of a larger one, or permuted."""
    layout = record.get("_layout")
    if len(ranks) != prod(sizes) or (layout and layout.get("stride") != row_major_strides(sizes)):
        return None
    place = 0
    for size, step in zip(sizes, coordinate, strict=True):
        place = place * size + step
    return ranks[place]


def _world_size(record: Opaque, ranks: Sequence[int]) -> int | None:
    """The ranks of the root mesh; it is the whole world in all frameworks that we know."""
    for key in _ROOTS:
        root = record.get(key)
        if isinstance(root, Opaque):
            listed = _integers(root.get("_flatten_rank_map") or root.get("_flatten_mesh_list"))
            if listed:
                return max(max(listed) + 1, len(listed))
    return max(max(ranks) + 1, len(ranks)) if ranks else None


def count_listed(record: Any) -> int:
    """How many ranks the record of a mesh lists, which is what reading it costs."""
    records = [record, *[record.get(key) for key in _ROOTS]] if isinstance(record, Opaque) else []
    meshes = [mesh for mesh in records if isinstance(mesh, Opaque)]
    lists = [mesh.get(key) for mesh in meshes for key in _RANK_LISTS]
    tensors = [mesh.get("mesh") for mesh in meshes]
    return sum([len(values) for values in lists if isinstance(values, (tuple, list))]) + sum(
        [prod(tensor.shape) for tensor in tensors if isinstance(tensor, StoredTensor)]
    )


def _volume(shape: Any, nesting: int = 0) -> int:
    if isinstance(shape, (tuple, list)) and len(shape) <= MAX_DIMS and nesting < _MAX_NESTING:
        return prod([_volume(part, nesting + 1) for part in shape])
    if isinstance(shape, int) and 0 < shape <= _MAX_RANKS:
        return shape
    raise FormatError(f"a device mesh with a dimension of {shape if isinstance(shape, int) else type(shape).__name__}")


def _integers(values: Any) -> tuple[int, ...]:
    if isinstance(values, (tuple, list)) and all(isinstance(value, int) for value in values):
        return tuple(values)
    return ()


def _read_integers(tensor: StoredTensor, roots: Mapping[str, Path]) -> tuple[int, ...]:
    """The values of a small contiguous integer tensor; empty where they cannot be read plainly."""
    storage, count, code = tensor.storage, prod(tensor.shape), _INTEGERS.get(tensor.dtype.name)
    if code is None or count > _MAX_RANKS or tensor.offset:
        return ()
    size = count * tensor.dtype.itemsize
    if size > storage.nbytes:
        return ()
    data = bytearray(size)
    with OpenFiles(roots) as files:
        files.read_into(storage.file, storage.offset, memoryview(data))
    values = array(code, bytes(data))
    if sys.byteorder == "big":
        values.byteswap()
    return tuple(values)
