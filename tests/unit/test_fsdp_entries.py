"""One rank's entries, from records as the unpickler builds them: meshes and placements of every torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unshard.dtypes import BF16, F32, I32, I64, U8, DType
from unshard.errors import FormatError, IncompleteError, UnshardError
from unshard.formats.fsdp.entries import RankReader
from unshard.formats.fsdp.mesh import Mesh, read_mesh
from unshard.formats.torch_file.records import Global, Opaque, Storage, StoredTensor, UnsupportedTensor, WrapperSubclass
from unshard.tensors import Box, SourceFile, row_major_strides

FILE = SourceFile("source", "rank.pt")
PLACEMENTS = "torch.distributed.tensor.placement_types"
OLD_PLACEMENTS = "torch.distributed._tensor.placement_types"


def stored(shape: tuple[int, ...], dtype: DType = F32, offset: int = 0) -> StoredTensor:
    storage = Storage(FILE, "0", dtype, 10_000, 640, 10_000 * dtype.itemsize)
    return StoredTensor(storage, dtype, shape, row_major_strides(shape), offset)


def record(path: str, **state: Any) -> Opaque:
    module, name = path.rsplit(".", 1)
    return Opaque(Global(module, name), state=state or None)


def placement(name: str, module: str = PLACEMENTS, **state: Any) -> Opaque:
    return record(f"{module}.{name}", **state)


def layout(shape: tuple[Any, ...], stride: tuple[Any, ...]) -> Opaque:
    """`_MeshLayout` of torch 2.10 to 2.12."""
    return record("torch.distributed._mesh_layout._MeshLayout", shape=shape, stride=stride)


def axes_layout(*axes: tuple[tuple[int, ...], tuple[int, ...]]) -> Opaque:
    """`_MeshLayout` of torch 2.13: one `_FlatLayout` per dimension."""
    flat = [record("torch.distributed._mesh_layout._FlatLayout", shape=shape, stride=stride) for shape, stride in axes]
    return record("torch.distributed._mesh_layout._MeshLayout", axes=tuple(flat))


def mesh_of(sizes: tuple[int, ...], coordinate: tuple[int, ...], names: tuple[str, ...] | None = None) -> Opaque:
    """A DeviceMesh of torch 2.11 over the whole world."""
    total = 1
    for size in sizes:
        total *= size
    rank = 0
    for size, place in zip(sizes, coordinate, strict=True):
        rank = rank * size + place
    return record(
        "torch.distributed.device_mesh.DeviceMesh",
        _layout=layout(sizes, row_major_strides(sizes)),
        _flatten_rank_map=tuple(range(total)),
        _mesh_dim_names=names,
        _coordinate_on_dim=coordinate,
        _rank=rank,
    )


def dtensor(
    shape: tuple[int, ...], local: StoredTensor | Any, mesh: Opaque, *placements: Opaque, cls: str = "", **spec: Any
) -> WrapperSubclass:
    described = record(f"{PLACEMENTS}.DTensorSpec", mesh=mesh, placements=placements, **spec)
    module = cls or "torch.distributed.tensor"
    state = {"_local_tensor": local, "_spec": described}
    return WrapperSubclass(Global(module, "DTensor"), F32, shape, state)


def reader(rank: int = 0, **options: Any) -> RankReader:
    return RankReader(rank, {"source": Path("/nowhere")}, **options)


def boxes(part: Any) -> list[str]:
    return [str(chunk.box) for chunk in part.chunks]


class TestMesh:
    def read(self, mesh: Opaque, rank: int = 0) -> Mesh:
        return read_mesh(mesh, {"source": Path("/nowhere")}, rank)

    def test_torch_2_2_to_2_9_lists_its_ranks(self) -> None:
        mesh = record(
            "torch.distributed.device_mesh.DeviceMesh",
            mesh=stored((2, 2), I32),
            mesh_dim_names=("ddp", "fsdp"),
            _flatten_mesh_list=(0, 1, 2, 3),
            _coordinate_on_dim=[1, 0],
        )
        assert self.read(mesh) == Mesh(("ddp", "fsdp"), (2, 2), (1, 0), 2, 4)

    @pytest.mark.parametrize("dtype", [I64, I32])
    def test_torch_2_1_keeps_its_ranks_in_a_tensor(self, dtype: DType, tmp_path: Path) -> None:
        values = b"".join(rank.to_bytes(dtype.itemsize, "little") for rank in (4, 5, 6, 7))
        (tmp_path / "rank.pt").write_bytes(b"x" * 640 + values)
        mesh = record(
            "torch.distributed._tensor.device_mesh.DeviceMesh",
            mesh=stored((4,), dtype),
            mesh_dim_names=None,
            _coordinate_on_dim=[2],
        )
        assert read_mesh(mesh, {"source": tmp_path}, 0) == Mesh(("dim0",), (4,), (2,), 6, 8)

    def test_torch_2_10_has_a_layout(self) -> None:
        mesh = mesh_of((2, 3), (1, 2), ("fsdp", "tp"))
        assert self.read(mesh) == Mesh(("fsdp", "tp"), (2, 3), (1, 2), 5, 6)

    def test_torch_2_10_without_a_rank_finds_it_in_the_map(self) -> None:
        mesh = mesh_of((2, 3), (1, 2))
        del mesh.state["_rank"]
        assert self.read(mesh).rank == 5

    def test_torch_2_13_has_an_axis_per_dimension_and_coalesces_those_of_one(self) -> None:
        mesh = mesh_of((2, 1, 4), (1, 0, 3), ("pp", "dp", "tp"))
        mesh.state["_layout"] = axes_layout(((2,), (4,)), ((), ()), ((4,), (1,)))
        assert self.read(mesh).dims == (("pp", 2), ("dp", 1), ("tp", 4))

    def test_a_slice_of_a_larger_mesh_keeps_its_own_coordinate(self) -> None:
        """The layout of `root["tp"]` does not say where the slice begins: the coordinate does."""
        mesh = mesh_of((2,), (1,), ("tp",))
        mesh.state |= {"_layout": layout((2,), (1,)), "_flatten_rank_map": tuple(range(8)), "_rank": 7}
        assert self.read(mesh) == Mesh(("tp",), (2,), (1,), 7, 8)

    def test_a_slice_without_a_rank_does_not_invent_one(self) -> None:
        mesh = mesh_of((2,), (1,))
        mesh.state |= {"_flatten_rank_map": tuple(range(8))}
        del mesh.state["_rank"]
        assert self.read(mesh).rank is None

    def test_a_flattened_dimension_has_the_product_of_its_sizes(self) -> None:
        mesh = mesh_of((8,), (5,))
        mesh.state["_layout"] = layout(((2, 4),), ((4, 1),))
        assert self.read(mesh).sizes == (8,)

    def test_without_a_coordinate_the_file_name_places_the_rank(self) -> None:
        mesh = record(
            "torch.distributed.device_mesh.DeviceMesh", mesh=stored((2, 2), I32), _flatten_mesh_list=(4, 5, 6, 7)
        )
        assert self.read(mesh, rank=6).coordinate == (1, 0)
        with pytest.raises(FormatError, match="does not belong"):
            self.read(mesh, rank=0)

    @pytest.mark.parametrize(
        "mesh",
        [
            None,
            record("torch.distributed.device_mesh.DeviceMesh"),
            record("torch.distributed.device_mesh.DeviceMesh", mesh="ranks"),
            record("torch.distributed.device_mesh.DeviceMesh", _layout=layout((0,), (1,))),
            record("torch.distributed.device_mesh.DeviceMesh", _layout=layout((1 << 40,), (1,))),
            record("torch.distributed.device_mesh.DeviceMesh", _layout=layout((2,), (1,)), _coordinate_on_dim=(2,)),
            record("torch.distributed.device_mesh.DeviceMesh", _layout=layout((2,), (1,)), _coordinate_on_dim=None),
            record("torch.distributed.device_mesh.DeviceMesh", _layout=layout((2, 2), (2, 1)), _coordinate_on_dim=(1,)),
            record("torch.distributed.device_mesh.DeviceMesh", _layout=layout(("2",), (1,)), _coordinate_on_dim=(0,)),
            record("torch.distributed.device_mesh.DeviceMesh", _layout=record("m._MeshLayout", axes=7)),
            record("torch.distributed.device_mesh.DeviceMesh", _layout=record("m._MeshLayout", axes=(7,))),
        ],
    )
    def test_what_is_no_mesh(self, mesh: Any) -> None:
        with pytest.raises(FormatError):
            self.read(mesh)

    @pytest.mark.parametrize("names", [7, "fsdp", (1,), ([],), {"fsdp": 2}])
    def test_names_of_other_kinds_are_none(self, names: Any) -> None:
        assert self.read(mesh_of((2,), (0,), names)).names == ("dim0",)


class TestDTensor:
    def test_rows_of_a_rank(self) -> None:
        mesh = mesh_of((4,), (1,), ("fsdp",))
        part = reader(1).read("w", dtensor((5, 2), stored((2, 2), offset=3), mesh, placement("Shard", dim=0)))
        (chunk,) = part.chunks
        assert (part.kind, part.shape, part.placements) == ("DTensor", (5, 2), "Shard(0)")
        assert chunk.box == Box((2, 0), (2, 2))
        assert (chunk.extent.offset, chunk.extent.strides, chunk.rank) == (640 + 3 * 4, (8, 4), 1)

    def test_a_rank_beyond_the_last_chunk_holds_nothing(self) -> None:
        mesh = mesh_of((4,), (3,))
        part = reader(3).read("w", dtensor((5, 2), stored((0, 2)), mesh, placement("Shard", dim=0)))
        assert part.chunks == ()

    def test_an_empty_piece_may_be_recorded_with_another_shape(self) -> None:
        part = reader(3).read("w", dtensor((5, 2), stored((0,)), mesh_of((4,), (3,)), placement("Shard", dim=0)))
        assert part.chunks == ()

    def test_a_negative_dim_counts_from_the_end(self) -> None:
        mesh = mesh_of((2,), (1,))
        part = reader(1).read("w", dtensor((2, 6), stored((2, 3)), mesh, placement("Shard", dim=-1)))
        assert boxes(part) == ["[0:2, 3:6]"]

    @pytest.mark.parametrize(("rank", "rows"), [(0, ["[0:3]"]), (1, ["[5:8]"]), (2, ["[3:5]"]), (3, ["[8:10]"])])
    def test_fsdp2_on_tensor_parallelism_cuts_from_right_to_left(self, rank: int, rows: list[str]) -> None:
        mesh = mesh_of((2, 2), divmod(rank, 2), ("fsdp", "tp"))
        local = stored((3,) if rank < 2 else (2,))
        strided = placement("_StridedShard", dim=0, split_factor=2)
        assert boxes(reader(rank).read("w", dtensor((10,), local, mesh, strided, placement("Shard", dim=0)))) == rows

    @pytest.mark.parametrize(
        ("length", "mesh", "rank", "size", "rows"),
        [
            (7, (3, 2), 2, 2, "[2:4]"),
            (7, (3, 2), 5, 1, "[6:7]"),
            (9, (4, 2), 1, 1, "[5:6]"),
            (9, (4, 2), 4, 1, "[4:5]"),
        ],
    )
    def test_uneven_shapes_that_torch_records_wrongly(
        self, length: int, mesh: tuple[int, int], rank: int, size: int, rows: str
    ) -> None:
        device_mesh = mesh_of(mesh, divmod(rank, mesh[1]))
        strided = placement("_StridedShard", dim=0, split_factor=2)
        value = dtensor((length,), stored((size,)), device_mesh, strided, placement("Shard", dim=0))
        assert boxes(reader(rank).read("w", value)) == [rows]

    def test_the_default_order_beside_a_strided_shard_is_not_believed(self) -> None:
        """Torch 2.10 to 2.12 record it, and it is not the order of the data."""
        order = (Opaque(Global("torch.distributed.tensor._dtensor_spec", "ShardOrderEntry"), (0, (0, 1))),)
        value = dtensor(
            (10,),
            stored((3,)),
            mesh_of((2, 2), (0, 1)),
            placement("_StridedShard", dim=0, split_factor=2),
            placement("Shard", dim=0),
            shard_order=order,
        )
        assert boxes(reader(1).read("w", value)) == ["[5:8]"]

    def test_a_recorded_shard_order_decides(self) -> None:
        order = (Opaque(Global("torch.distributed.tensor._dtensor_spec", "ShardOrderEntry"), (0, (1, 0))),)
        shards = (placement("Shard", dim=0), placement("Shard", dim=0))
        value = dtensor((8,), stored((2,)), mesh_of((2, 2), (0, 1)), *shards, shard_order=order)
        assert boxes(reader(1).read("w", value)) == ["[4:6]"]
        assert boxes(reader(1).read("w", dtensor((8,), stored((2,)), mesh_of((2, 2), (0, 1)), *shards))) == ["[2:4]"]

    def old_value(self) -> WrapperSubclass:
        mesh = record(
            "torch.distributed.device_mesh.DeviceMesh",
            mesh=stored((2, 2), I32),
            mesh_dim_names=("dp", "tp"),
            _flatten_mesh_list=(0, 1, 2, 3),
            _coordinate_on_dim=[0, 1],
        )
        shard = placement("Shard", OLD_PLACEMENTS, dim=0)
        return dtensor((8,), stored((2,)), mesh, shard, shard, cls="torch.distributed._tensor.api")

    def test_torch_2_2_to_2_4_recorded_fsdp2_with_tensor_parallelism_in_the_wrong_order(self) -> None:
        part = reader(1).read("w", self.old_value())
        assert boxes(part) == ["[4:6]"]
        assert part.reordered

    def test_fsdp1_of_those_versions_is_left_to_right(self) -> None:
        part = reader(1, is_fsdp1=True).read("w", self.old_value())
        assert (boxes(part), part.reordered) == (["[2:4]"], False)

    def test_replicas_hold_everything(self) -> None:
        mesh = mesh_of((2, 2), (1, 0), ("ddp", "fsdp"))
        part = reader(2).read("w", dtensor((4,), stored((2,)), mesh, placement("Replicate"), placement("Shard", dim=0)))
        assert (boxes(part), part.placements) == (["[0:2]"], "Replicate, Shard(0)")

    @pytest.mark.parametrize("name", ["Partial", "_Partial", "MaskPartial", "_MaskPartial"])
    def test_partial_values_are_refused_by_name(self, name: str) -> None:
        value = dtensor((4,), stored((4,)), mesh_of((2,), (0,)), placement(name, reduce_op="sum"))
        with pytest.raises(FormatError, match=rf"w, rank 0: placement {name} .*reduced"):
            reader().read("w", value)

    def test_an_unknown_placement_is_refused_by_name(self) -> None:
        with pytest.raises(FormatError, match="placement Ragged"):
            reader().read("w", dtensor((4,), stored((4,)), mesh_of((2,), (0,)), placement("Ragged")))

    def test_a_piece_of_the_wrong_size_names_tensor_rank_found_and_expected(self) -> None:
        value = dtensor((10, 4), stored((4, 4)), mesh_of((2,), (1,), ("fsdp",)), placement("Shard", dim=0))
        with pytest.raises(IncompleteError) as caught:
            reader(1).read("lm_head.weight", value)
        for word in ("lm_head.weight", "rank 1", "(4, 4)", "(5, 4)", "fsdp=2", "Shard(0)"):
            assert word in str(caught.value)

    @pytest.mark.parametrize(
        "value",
        [
            dtensor((4,), UnsupportedTensor("is sparse"), mesh_of((1,), (0,)), placement("Shard", dim=0)),
            dtensor((4,), stored((4,)), mesh_of((1,), (0,)), placement("Shard", dim=1)),
            dtensor((4,), stored((4,)), mesh_of((1,), (0,)), placement("Shard", dim="x")),
            dtensor((4,), stored((4,)), mesh_of((1,), (0,))),
            dtensor((4,), stored((4,)), mesh_of((1,), (0,)), placement("_StridedShard", dim=0, split_factor=1 << 50)),
            dtensor((4,), stored((2,)), mesh_of((2,), (0,)), placement("Shard", dim=0), shard_order=((0, (5,)),)),
            WrapperSubclass(Global("torch.distributed.tensor", "DTensor"), F32, (4,), None),
            WrapperSubclass(Global("torchao.float8", "Float8Tensor"), F32, (4,), {}),
            UnsupportedTensor("is quantised", (4,)),
        ],
    )
    def test_what_cannot_be_read_is_an_error_with_the_tensor_and_the_rank(self, value: Any) -> None:
        with pytest.raises(UnshardError, match="w, rank 0: "):
            reader().read("w", value)

    @pytest.mark.parametrize("lie", [None, 7, {}, "rows", (7,), ((),), ({"dim": 0},)])
    @pytest.mark.parametrize("field", ["placements", "shard_order", "mesh"])
    def test_a_spec_of_other_kinds_of_values(self, field: str, lie: Any) -> None:
        value = dtensor((4,), stored((2,)), mesh_of((2,), (0,)), placement("Shard", dim=0))
        value.state["_spec"].state[field] = lie
        if field == "shard_order" and not isinstance(lie, tuple):
            assert boxes(reader().read("w", value)) == ["[0:2]"]
        else:
            with pytest.raises(FormatError, match="w, rank 0: "):
                reader().read("w", value)

    @pytest.mark.parametrize("entry", [(0,), (0, 5), ("0", (0,)), (0, ("0",)), (0, ([],)), (0, (0,) * 1000)])
    def test_a_shard_order_of_other_kinds_of_values(self, entry: Any) -> None:
        value = dtensor((4,), stored((2,)), mesh_of((2,), (0,)), placement("Shard", dim=0), shard_order=(entry,))
        with pytest.raises(FormatError, match=r"w, rank 0: .*shard order"):
            reader().read("w", value)

    def test_two_shards_on_a_mesh_of_one_dimension(self) -> None:
        """The order of torch 2.2 to 2.4 is that of two mesh dimensions; here there is no second one."""
        shards = (placement("Shard", OLD_PLACEMENTS, dim=0), placement("Shard", OLD_PLACEMENTS, dim=0))
        value = dtensor((4,), stored((1,)), mesh_of((4,), (0,)), *shards, cls="torch.distributed._tensor.api")
        with pytest.raises(FormatError, match="2 placements on a mesh of 1 dimensions"):
            reader().read("w", value)

    def test_the_mesh_tells_who_wrote_the_file(self) -> None:
        one = reader(0)
        one.read("w", dtensor((4,), stored((1,)), mesh_of((4,), (3,)), placement("Shard", dim=0)))
        assert (one.recorded, one.world) == ({3}, 4)


def sharded(
    shape: tuple[int, ...], *shards: tuple[tuple[int, ...], StoredTensor], rank: int = 0, world: int = 2
) -> WrapperSubclass:
    local = [
        record(
            "torch.distributed._shard.sharded_tensor.shard.Shard",
            tensor=tensor,
            metadata=record("m.ShardMetadata", shard_offsets=list(offsets), shard_sizes=list(tensor.shape)),
        )
        for offsets, tensor in shards
    ]
    group = record("ShardedTensor.ProcessGroupState", global_rank=rank, global_world_size=world)
    cls = Global("torch.distributed._shard.sharded_tensor.api", "ShardedTensor")
    return WrapperSubclass(cls, F32, shape, (local, None, group, None, False))


class TestShardedTensor:
    def test_a_shard_lies_where_its_metadata_says(self) -> None:
        one = reader(1)
        part = one.read("w", sharded((5, 2), ((3, 0), stored((2, 2), BF16)), rank=1))
        assert (boxes(part), part.dtype, part.kind) == (["[3:5, 0:2]"], BF16, "ShardedTensor")
        assert (one.recorded, one.world) == ({1}, 2)

    def test_a_rank_without_local_shards(self) -> None:
        part = reader(7).read("w", sharded((5, 2), rank=7, world=8))
        assert (part.chunks, part.dtype, part.shape) == ((), F32, (5, 2))

    def test_a_shard_outside_the_tensor(self) -> None:
        with pytest.raises(IncompleteError, match=r"outside the tensor's shape \(5, 2\)"):
            reader().read("w", sharded((5, 2), ((4, 0), stored((2, 2)))))

    def test_a_shard_of_another_size_than_its_metadata(self) -> None:
        value = sharded((5, 2), ((3, 0), stored((2, 2))))
        value.state[0][0].state["metadata"].state["shard_sizes"] = [1, 2]
        with pytest.raises(IncompleteError, match=r"w, rank 0: holds a shard of \(2, 2\), but .*\(1, 2\)"):
            reader().read("w", value)

    @pytest.mark.parametrize("lie", [None, 7, "rows", (3, "0"), ([], []), {0: 3}])
    @pytest.mark.parametrize("field", ["shard_offsets", "shard_sizes"])
    def test_metadata_of_other_kinds_of_values(self, field: str, lie: Any) -> None:
        value = sharded((5, 2), ((3, 0), stored((2, 2))))
        value.state[0][0].state["metadata"].state[field] = lie
        with pytest.raises(FormatError, match="w, rank 0: "):
            reader().read("w", value)

    @pytest.mark.parametrize("state", [None, (), ([], None), ("shards", None, None, None, None)])
    def test_a_state_that_is_none(self, state: Any) -> None:
        cls = Global("torch.distributed._shard.sharded_tensor.api", "ShardedTensor")
        with pytest.raises(FormatError):
            reader().read("w", WrapperSubclass(cls, F32, (4,), state))


def test_a_plain_tensor_is_whole() -> None:
    part = reader(3).read("w", stored((2, 3)))
    assert (part.kind, boxes(part), part.chunks[0].rank) == ("tensor", ["[0:2, 0:3]"], 3)


def test_a_plain_scalar_and_an_empty_tensor() -> None:
    assert boxes(reader().read("step", stored(()))) == ["[]"]
    assert reader().read("none", stored((0, 3))).chunks == ()


def test_quantised_weights_are_not_taken_for_integers() -> None:
    """Bitsandbytes keeps four-bit weights as bytes in a Parameter subclass; merged as U8 they would mean nothing."""
    packed = replace(stored((8, 1), U8), cls=Global("bitsandbytes.nn.modules", "Params4bit"))
    with pytest.raises(FormatError, match=r"w, rank 0.*Params4bit.*packed"):
        reader().read("w", packed)
    plain = replace(stored((2, 3)), cls=Global("vllm.model_executor.parameter", "ModelWeightParameter"))
    assert reader().read("w", plain).shape == (2, 3)
