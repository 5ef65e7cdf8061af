"""One entry of one rank's state dict: what tensor it is a part of, and which pieces of it the rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from unshard.dtypes import DType
from unshard.errors import FormatError, IncompleteError
from unshard.formats.fsdp.mesh import MAX_DIMS, Mesh, count_listed, read_mesh
from unshard.formats.fsdp.placements import REPLICATE, Placement, ShardOrder, share_of_rank
from unshard.formats.state_dict import read_chunk, read_whole
from unshard.formats.torch_file.records import Opaque, StoredTensor, UnsupportedTensor, WrapperSubclass
from unshard.tensors import Box, Chunk

_MAX_CHUNKS = 1 << 20
"""Pieces of tensors in one rank's file. Their records are kept until all ranks are read, half a kilobyte each."""
_MAX_LISTED = 1 << 27
"""Ranks that the meshes of one file list, all together. From torch 2.10 on each parameter may bring its own mesh."""
_PARTIAL = frozenset({"Partial", "_Partial", "MaskPartial", "_MaskPartial", "_NormPartial"})
"""Placements of sums that are still spread over the ranks."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank's entry says: the whole tensor's kind, dtype and shape, and the pieces that are here.

    kind:       "DTensor", "ShardedTensor" or "tensor".
    placements: in words, for people: "Shard(0)", "Replicate, Shard(0)"; empty for plain tensors.
    reordered:  whether the placements were read in another order than the recorded one (see `_tp_first`).
    """

    kind: str
    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    placements: str = ""
    mesh: Mesh | None = None
    reordered: bool = False


@dataclass(slots=True)
class RankReader:
    """Reads the entries of one rank's file, and remembers what the entries say of the rank itself.

    rank:      the number that the file is named after.
    roots:     places of the source files, for the few bytes of an old mesh tensor.
    is_fsdp1:  whether the checkpoint says that FSDP1 wrote it.
    recorded:  global ranks that entries name as their writer; one, unless files were mixed.
    world:     the largest world size that an entry names.
    """

    rank: int
    roots: Mapping[str, Path]
    is_fsdp1: bool = False
    recorded: set[int] = field(default_factory=set)
    world: int = 0
    _meshes: dict[int, Mesh] = field(default_factory=dict)
    _listed: int = 0
    _chunks: int = 0

    def read(self, name: str, value: StoredTensor | WrapperSubclass | UnsupportedTensor) -> Part:
        """The part of tensor `name` in this rank's file.

        Raises FormatError for kinds that cannot be read and IncompleteError where a piece does not have the size that
        its placements give it; both name tensor and rank.
        """
        try:
            return self._read(value)
        except (FormatError, IncompleteError) as error:
            raise type(error)(f"{name}, rank {self.rank}: {error.message}", hint=error.hint) from None

    def _read(self, value: StoredTensor | WrapperSubclass | UnsupportedTensor) -> Part:
        if isinstance(value, StoredTensor):
            return Part("tensor", value.dtype, value.shape, read_whole(value, self.rank))
        if isinstance(value, UnsupportedTensor):
            raise FormatError(f"this tensor {value.reason}")
        if value.cls.name == "DTensor":
            return self._read_dtensor(value)
        if value.cls.name == "ShardedTensor":
            return self._read_sharded_tensor(value)
        raise FormatError(f"a tensor of class {value.cls.path} cannot be read")

    def _read_dtensor(self, value: WrapperSubclass) -> Part:
        state = value.state if isinstance(value.state, dict) else {}
        local, spec = state.get("_local_tensor"), state.get("_spec")
        if not isinstance(local, StoredTensor) or not isinstance(spec, Opaque):
            raise FormatError(f"a DTensor whose local part is {_class_of(local)}, which cannot be read")
        mesh = self._mesh(spec.get("mesh"))
        placements = _read_placements(spec.get("placements"))
        order = _read_shard_order(spec.get("shard_order"))
        reordered = not self.is_fsdp1 and len(mesh.sizes) == 2 and _is_tp_first(value, spec, placements)
        laid = _tp_first(placements, mesh.sizes) if reordered else placements
        try:
            share = share_of_rank(value.shape, laid, mesh.sizes, mesh.coordinate, order)
        except ValueError as error:
            raise FormatError(str(error)) from None
        words = ", ".join([str(placement) for placement in placements])
        if local.shape != share.shape and (0 not in local.shape or 0 not in share.shape):
            raise IncompleteError(
                f"holds a piece of {local.shape}, but {words} on mesh {_in_words(mesh)} at {mesh.coordinate} "
                f"gives it {share.shape} of {value.shape}",
                hint="the file was changed after it was written, or its placements were recorded wrongly",
            )
        self._count_chunks(len(share.pieces))
        chunks = tuple([read_chunk(local, box, here, self.rank) for box, here in share.pieces])
        return Part("DTensor", local.dtype, value.shape, chunks, words, mesh, reordered)

    def _read_sharded_tensor(self, value: WrapperSubclass) -> Part:
        """State: (local_shards, metadata, ProcessGroupState, sharding_spec, init_rrefs)."""
        state = value.state
        if not (isinstance(state, tuple) and len(state) == 5 and isinstance(state[0], list)):
            raise FormatError("a ShardedTensor whose state cannot be read")
        shards, _, group, _, _ = state
        if isinstance(group, Opaque):
            self._note_writer(group.get("global_rank"), group.get("global_world_size"))
        self._count_chunks(len(shards))
        chunks: list[Chunk] = []
        dtype = value.dtype
        for shard in shards:
            tensor = shard.get("tensor") if isinstance(shard, Opaque) else None
            place = shard.get("metadata") if isinstance(shard, Opaque) else None
            if not isinstance(tensor, StoredTensor) or not isinstance(place, Opaque):
                raise FormatError(f"a shard whose data is {_class_of(tensor)}, which cannot be read")
            chunks += _read_shard(tensor, place, value.shape, self.rank)
            dtype = tensor.dtype
        if dtype is None:
            raise FormatError("a ShardedTensor of a dtype that cannot be read")
        return Part("ShardedTensor", dtype, value.shape, tuple(chunks), "ShardedTensor")

    def _mesh(self, record: Any) -> Mesh:
        """The mesh of a record; the tensors of a file share a handful of them."""
        mesh = self._meshes.get(id(record))
        if mesh is None:
            self._listed += count_listed(record)
            if self._listed > _MAX_LISTED:
                raise FormatError("the device meshes of this file list more ranks than any cluster has")
            mesh = self._meshes[id(record)] = read_mesh(record, self.roots, self.rank)
            self._note_writer(mesh.rank, mesh.world_size)
        return mesh

    def _count_chunks(self, count: int) -> None:
        self._chunks += count
        if self._chunks > _MAX_CHUNKS:
            raise FormatError(f"the tensors of this file are cut into more than {_MAX_CHUNKS:,} pieces")

    def _note_writer(self, rank: Any, world: Any) -> None:
        if isinstance(rank, int):
            self.recorded.add(rank)
        if isinstance(world, int):
            self.world = max(self.world, world)


def _read_shard(tensor: StoredTensor, place: Opaque, shape: tuple[int, ...], rank: int) -> list[Chunk]:
    """The chunk of one `Shard` of a ShardedTensor; none if it has no elements."""
    offsets, sizes = _read_counts(place.get("shard_offsets")), _read_counts(place.get("shard_sizes"))
    if tensor.shape != sizes:
        raise IncompleteError(f"holds a shard of {tensor.shape}, but its metadata says {sizes} at {offsets}")
    if not prod(sizes):
        return []
    try:
        box = Box(offsets, sizes)
    except ValueError as error:
        raise FormatError(str(error)) from None
    if not box.fits(shape):
        raise IncompleteError(f"holds a shard {box}, which is outside the tensor's shape {shape}")
    return [read_chunk(tensor, box, Box.whole(sizes), rank)]


def _read_counts(values: Any) -> tuple[int, ...]:
    """Offsets or sizes: a list, or a tuple such as torch.Size."""
    if not isinstance(values, (tuple, list)) or not all(isinstance(value, int) for value in values):
        raise FormatError("a shard whose metadata cannot be read")
    return tuple(values)


def _read_placements(records: Any) -> tuple[Placement, ...]:
    """`DTensorSpec.placements`, one per mesh dimension."""
    if not isinstance(records, (tuple, list)) or len(records) > MAX_DIMS:
        raise FormatError("a DTensor whose placements cannot be read")
    return tuple([_read_placement(record) for record in records])


def _read_placement(record: Any) -> Placement:
    name = record.cls.name if isinstance(record, Opaque) else type(record).__name__
    if name == "Replicate":
        return REPLICATE
    if isinstance(record, Opaque) and name in ("Shard", "_StridedShard") and isinstance(record.get("dim"), int):
        split = record.get("split_factor", 0) if name == "_StridedShard" else 0
        return Placement(record.get("dim"), split if isinstance(split, int) and split > 0 else 0)
    if name in _PARTIAL:
        raise FormatError(
            f"placement {name} cannot be merged: its values would have to be reduced over ranks",
            hint="save the tensors after redistributing them to Shard or Replicate",
        )
    raise FormatError(f"placement {name} cannot be merged: its meaning is not known")


def _read_shard_order(record: Any) -> ShardOrder | None:
    """`DTensorSpec.shard_order`: a tuple of `ShardOrderEntry(tensor_dim, mesh_dims)`, or None."""
    if not isinstance(record, tuple):
        return None
    order: list[tuple[int, tuple[int, ...]]] = []
    for entry in record[:MAX_DIMS]:
        match entry.args if isinstance(entry, Opaque) else entry:
            case (int(dim), (*axes,)) if len(axes) <= MAX_DIMS and all(isinstance(axis, int) for axis in axes):
                order.append((dim, tuple(axes)))
            case _:
                raise FormatError("a DTensor whose shard order cannot be read")
    return tuple(order)


def _is_tp_first(value: WrapperSubclass, spec: Opaque, placements: tuple[Placement, ...]) -> bool:
    """Whether `(Shard(0), Shard(0))` was written by FSDP2 of torch 2.2 to 2.4 on top of tensor parallelism.

    Those versions recorded plain Shards from left to right although tensor parallelism had cut first
    (`torch/distributed/_composable/fsdp/_fsdp_param.py`); 2.5 brought `_StridedShard` for it. They are known by a
    DTensor of `torch.distributed._tensor` (until 2.4) on a mesh of `torch.distributed.device_mesh` (from 2.2).
    """
    mesh = spec.get("mesh")
    return (
        value.cls.module.startswith("torch.distributed._tensor")
        and isinstance(mesh, Opaque)
        and mesh.cls.module == "torch.distributed.device_mesh"
        and placements == (Placement(0), Placement(0))
    )


def _tp_first(placements: tuple[Placement, ...], mesh: tuple[int, ...]) -> tuple[Placement, ...]:
    """The placements that say what FSDP2 of torch 2.2 to 2.4 did."""
    return (Placement(0, mesh[1]), placements[1])


def _in_words(mesh: Mesh) -> str:
    return "(" + ", ".join([f"{name}={size}" for name, size in mesh.dims]) + ")"


def _class_of(value: Any) -> str:
    if isinstance(value, UnsupportedTensor):
        return f"a tensor that {value.reason}"
    cls = getattr(value, "cls", None)
    return f"a {cls.path}" if cls is not None else f"a {type(value).__name__}"
