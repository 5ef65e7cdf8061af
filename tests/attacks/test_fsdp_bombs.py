"""Small rank files that would cost hours or all memory: records that many tensors share, cuts that multiply."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from unshard.dtypes import F32, U8
from unshard.errors import FormatError
from unshard.formats.fsdp import entries
from unshard.formats.fsdp.entries import RankReader
from unshard.formats.fsdp.mesh import MAX_DIMS, read_mesh
from unshard.formats.fsdp.placements import Placement, share_of_rank
from unshard.formats.state_dict import MAX_ENTRIES, find_state_dict
from unshard.formats.torch_file.records import Global, Opaque, Storage, StoredTensor, WrapperSubclass
from unshard.tensors import SourceFile, row_major_strides

SECONDS = 30
"""Far more than a refusal takes, far less than what is refused would."""

NOWHERE = {"source": Path("/nowhere")}


@pytest.fixture(autouse=True)
def soon() -> Iterator[None]:
    started = monotonic()
    yield
    assert monotonic() - started < SECONDS


def stored(*shape: int) -> StoredTensor:
    storage = Storage(SourceFile("source", "rank.pt"), "0", U8, 1 << 16, 640, 1 << 16)
    return StoredTensor(storage, U8, shape, row_major_strides(shape), 0)


def record(name: str, **state: Any) -> Opaque:
    return Opaque(Global("m", name), state=state)


def mesh(sizes: Any, ranks: Any) -> Opaque:
    shape = record("_MeshLayout", shape=sizes)
    return record("DeviceMesh", _layout=shape, _flatten_rank_map=ranks, _coordinate_on_dim=(0,), _rank=0)


def read_all(values: Sequence[WrapperSubclass]) -> None:
    """Read entries of one rank's file."""
    reader = RankReader(0, NOWHERE)
    for number, value in enumerate(values):
        reader.read(f"w{number}", value)


def test_strided_cuts_of_strided_cuts() -> None:
    cuts = (Placement(0, 20_000), Placement(0, 20_001))
    with pytest.raises(ValueError, match="too many"):
        share_of_rank((10**9,), cuts, (2, 2), (0, 0))


def test_many_tensors_in_many_pieces_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand names for one storage of 4096 bytes: four million pieces."""
    monkeypatch.setattr(entries, "_MAX_CHUNKS", 50_000)
    placements = (record("_StridedShard", dim=0, split_factor=4096),)
    spec = record("DTensorSpec", mesh=mesh((2,), (0, 1)), placements=placements)
    value = WrapperSubclass(Global("m", "DTensor"), U8, (2 * 4096,), {"_local_tensor": stored(4096), "_spec": spec})
    with pytest.raises(FormatError, match="more than 50,000 pieces"):
        read_all([value] * 1000)


def test_one_shard_in_a_list_again_and_again() -> None:
    shard = record("Shard", tensor=stored(2), metadata=record("ShardMetadata", shard_offsets=[0], shard_sizes=[2]))
    value = WrapperSubclass(Global("m", "ShardedTensor"), F32, (2,), ([shard] * 10_000_000, None, None, None, None))
    with pytest.raises(FormatError, match="more than 1,048,576 pieces"):
        RankReader(0, NOWHERE).read("w", value)


def test_every_tensor_on_a_mesh_of_its_own_that_shares_a_long_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "_MAX_LISTED", 10_000_000)
    ranks, values = tuple(range(1 << 20)), []
    for _ in range(7_000):
        spec = record("DTensorSpec", mesh=mesh((2,), ranks), placements=(record("Shard", dim=0),))
        values.append(WrapperSubclass(Global("m", "DTensor"), U8, (2,), {"_local_tensor": stored(1), "_spec": spec}))
    with pytest.raises(FormatError, match="more ranks than any cluster has"):
        read_all(values)


def nested(width: int, depth: int) -> Any:
    sizes: Any = 1
    for _ in range(depth):
        sizes = (sizes,) * width
    return sizes


@pytest.mark.parametrize("sizes", [nested(2, 5000), nested(1000, 4), (1,) * (MAX_DIMS + 1)])
def test_a_mesh_of_nested_or_countless_dimensions(sizes: Any) -> None:
    with pytest.raises(FormatError, match="a device mesh"):
        read_mesh(mesh(sizes, (0, 1)), NOWHERE, 0)


def test_a_mesh_that_contains_itself() -> None:
    sizes: list[Any] = []
    sizes.append(sizes)
    with pytest.raises(FormatError, match="a device mesh"):
        read_mesh(mesh(sizes, (0, 1)), NOWHERE, 0)


def test_millions_of_names_for_one_tensor() -> None:
    one = stored(1)
    with pytest.raises(FormatError, match="500,001 entries"):
        find_state_dict({str(number): one for number in range(MAX_ENTRIES + 1)}, "model.pt")
