"""Pieces of tensors into a `torch.distributed.checkpoint` directory, as several ranks would have written them."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A box of the tensor `key`, whose whole size is `size`, saved by `rank`."""

    key: str
    size: tuple[int, ...]
    offset: tuple[int, ...]
    data: torch.Tensor
    rank: int

    def stacked(self, index: int, count: int) -> Piece:
        """The piece as entry `index` of a leading axis of `count`."""
        size, offset = (count, *self.size), (index, *self.offset)
        return dataclasses.replace(self, size=size, offset=offset, data=self.data[None])

    @property
    def item(self) -> WriteItem:
        """What torch's planners call it."""
        index = MetadataIndex(self.key, torch.Size(self.offset))
        chunk = ChunkStorageMetadata(torch.Size(self.offset), self.data.shape)
        properties = TensorProperties.create_from_tensor(self.data)
        data = TensorWriteData(chunk, properties, torch.Size(self.size))
        return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


class _Planner(DefaultSavePlanner):
    """Hands the pieces and objects to the storage writer."""

    def __init__(self, pieces: Sequence[Piece], objects: Mapping[str, bytes]) -> None:
        super().__init__(flatten_state_dict=False)
        self.data = {(piece.key, torch.Size(piece.offset)): piece.data for piece in pieces}
        self.objects = objects

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The value of an item."""
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self.objects[write_item.index.fqn])
        return self.data[write_item.index.fqn, write_item.index.offset].contiguous()


def save_pieces(
    directory: Path, pieces: Sequence[Piece], objects: Mapping[str, bytes], *, files_per_rank: int = 1
) -> None:
    """Write `.metadata` and the files `__{rank}_{n}.distcp`; the objects (serialized already) are rank 0's."""
    planner = _Planner(pieces, objects)
    writer = FileSystemWriter(directory, thread_count=files_per_rank, sync_files=False)
    writer.set_up_storage_writer(is_coordinator=True)
    plans = [
        writer.prepare_local_plan(SavePlan([piece.item for piece in pieces if piece.rank == rank]))
        for rank in range(1 + max(piece.rank for piece in pieces))
    ]
    plans[0].items.extend(
        WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(len(value)))
        for key, value in objects.items()
    )
    plans, metadata = planner.create_global_plan(plans)
    results = [writer.write_data(plan, planner).wait() for plan in writer.prepare_global_plan(plans)]
    writer.finish(metadata, results)
