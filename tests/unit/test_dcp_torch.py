"""The reader of DCP directories against what PyTorch itself saves, and loads from them."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest

import dcp_bytes as db
from assembled import gather
from gloo import run_ranks
from unshard.formats.dcp.container import Container, read_container
from unshard.formats.dcp.objects import read_item
from unshard.formats.dcp.uneven import Written, settle
from unshard.plan.coverage import prove_coverage
from unshard.tensors import Box

torch = pytest.importorskip("torch")
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # noqa: E402
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner  # noqa: E402
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
]  # fmt: skip


def bits(tensor: Any) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def load_flat(directory: Path) -> dict[str, Any]:
    """All that is in the checkpoint, by flattened keys, as torch loads it."""
    state: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planner = _EmptyStateDictLoadPlanner()
        _load_state_dict(state, storage_reader=dcp.FileSystemReader(directory), planner=planner, no_dist=True)
    return flatten_state_dict(state)[0]  # type: ignore[no-any-return]


def assert_as_torch_loads(directory: Path) -> Container:
    container = read_container(directory, db.ROOT)
    assert container.problems == ()
    truth = load_flat(directory)
    assert sorted([*container.tensors, *container.items]) == sorted(truth)
    for name, tensor in container.tensors.items():
        assert prove_coverage(tensor) == []
        assert tensor.shape == tuple(truth[name].shape)
        assert tensor.dtype.torch_name == str(truth[name].dtype).removeprefix("torch.")
        assert gather(tensor, {db.ROOT: directory}) == bits(truth[name]), name
    for name, item in container.items.items():
        value = read_item(item)
        if truth[name] is None or isinstance(truth[name], (bool, int, float, str)):
            assert value == truth[name]
    return container


def state_dict() -> dict[str, Any]:
    model: dict[str, Any] = {str(dtype): (torch.arange(12) % 2).reshape(3, 4).to(dtype) for dtype in DTYPES}
    model["scalar"] = torch.tensor(2.5)
    model["empty"] = torch.zeros(0, 3)
    model["view"] = torch.arange(40.0).reshape(8, 5)[2:6].T
    return {"model": model, "step": 7, "lr": [1e-4, {"group": torch.ones(2)}], "text": "é"}


@pytest.mark.parametrize(
    "options",
    [{}, {"thread_count": 3}, {"single_file_per_rank": False}, {"sync_files": False, "overwrite": True}],
    ids=str,
)
def test_what_one_process_saves(tmp_path: Path, options: dict[str, Any]) -> None:
    dcp.save(state_dict(), storage_writer=dcp.FileSystemWriter(tmp_path, **options), no_dist=True)
    container = assert_as_torch_loads(tmp_path)
    assert container.paths["model.torch.int8"] == ("model", "torch.int8")
    assert container.paths["lr.1.group"] == ("lr", 1, "group")
    files = {"thread_count": 3, "single_file_per_rank": len(container.tensors) + len(container.items)}
    assert len(list(tmp_path.glob("*.distcp"))) == files.get(next(iter(options), ""), 1)


def test_items_that_are_safetensors(tmp_path: Path) -> None:
    """Here torch 2.13 cannot load what it saved: the truth is what was saved."""
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    state = {"model": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(5).to(torch.bfloat16)}, "step": 7}
    writer = dcp.FileSystemWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save(state, storage_writer=writer, no_dist=True)
    container = read_container(tmp_path, db.ROOT)
    assert container.problems == ()
    assert sorted(container.tensors) == ["model.a", "model.b"]
    for name in ("a", "b"):
        assert gather(container.tensors[f"model.{name}"], {db.ROOT: tmp_path}) == bits(state["model"][name])
    assert read_item(container.items["step"]) == 7


def test_extensions_of_users_are_refused_by_name(tmp_path: Path) -> None:
    from torch.distributed.checkpoint._extension import StreamTransformExtension

    class Upside(StreamTransformExtension):
        @staticmethod
        def registry_name() -> str:
            return "stream.upside"

        @staticmethod
        def from_descriptor(version: str) -> Upside:
            return Upside()

        def get_descriptor(self) -> str:
            return "stream.upside@example/1"

        def transform_to(self, output: Any) -> Any:
            class Inverse(io.RawIOBase):
                def write(self, data: Any) -> int:
                    return output.write(bytes([255 - value for value in bytes(data)]))  # type: ignore[no-any-return]

            return Inverse()

        def transform_from(self, input: Any) -> Any:
            return input

    writer = dcp.FileSystemWriter(tmp_path, _extensions=[Upside()])
    dcp.save({"w": torch.ones(2)}, storage_writer=writer, no_dist=True)
    (problem,) = read_container(tmp_path, db.ROOT).problems
    assert "written through 'stream.upside@example/1'" in problem.message


# Several ranks -------------------------------------------------------------------------------------------------------


def test_what_several_ranks_save(tmp_path: Path) -> None:
    """Rows and columns cut evenly and unevenly, ranks that hold nothing, replicas, and what only one rank writes."""
    whole = {name: torch.arange(count * 6.0).reshape(count, 6) for name, count in (("even", 8), ("odd", 5), ("few", 1))}

    def save(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        state: dict[str, Any] = {"plain": torch.ones(3), "step": 3}
        for name, tensor in whole.items():
            for layout in ((Shard(0), Replicate()), (Shard(0), Shard(1)), (Shard(1), Replicate())):
                key = f"{name}.{''.join([str(part.dim) if part.is_shard() else 'r' for part in layout])}"
                state[key] = torch.distributed.tensor.distribute_tensor(tensor.clone(), mesh, layout)
        dcp.save(state, checkpoint_id=tmp_path / "ckpt")

    run_ranks(4, save, tmp_path)
    container = assert_as_torch_loads(tmp_path / "ckpt")
    assert {chunk.rank for tensor in container.tensors.values() for chunk in tensor.chunks} == {0, 1, 2, 3}
    assert gather(container.tensors["odd.01"], {db.ROOT: tmp_path / "ckpt"}) == bits(whole["odd"])


def test_metadata_of_single_ranks(tmp_path: Path) -> None:
    whole = torch.arange(10.0).reshape(5, 2)

    def save(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        local = torch.distributed.tensor.distribute_tensor(whole.clone(), mesh, (Shard(0),))
        dcp.save({"w": local, "step": rank}, checkpoint_id=tmp_path / "ckpt", use_collectives=False)

    run_ranks(2, save, tmp_path)
    assert sorted(path.name for path in (tmp_path / "ckpt").glob("*.metadata")) == ["__0.metadata", "__1.metadata"]
    container = read_container(tmp_path / "ckpt", db.ROOT)
    assert container.problems == ()
    assert prove_coverage(container.tensors["w"]) == []
    assert gather(container.tensors["w"], {db.ROOT: tmp_path / "ckpt"}) == bits(whole)
    assert read_item(container.items["step"]) == 0


def test_uneven_rows_of_fsdp_above_tensor_parallelism(tmp_path: Path) -> None:
    """7 rows on a mesh of 3 x 2, cut by torch.chunk as FSDP2 does: torch records wrong boxes for two ranks."""
    whole = {rows: torch.arange(rows * 2.0).reshape(rows, 2) for rows in (7, 8)}

    def save(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("fsdp", "tp"))
        state = {}
        for rows, tensor in whole.items():
            local = piece(piece(tensor, 2, rank % 2), 3, rank // 2)
            layout = (_StridedShard(0, split_factor=2), Shard(0))
            state[f"w{rows}"] = DTensor.from_local(
                local, mesh, layout, run_check=False, shape=tensor.shape, stride=tensor.stride()
            )
        dcp.save(state, checkpoint_id=tmp_path / "ckpt")

    run_ranks(6, save, tmp_path)
    container = read_container(tmp_path / "ckpt", db.ROOT)
    assert container.problems == ()
    for rows, tensor in whole.items():
        assert prove_coverage(container.tensors[f"w{rows}"]) == []
        assert gather(container.tensors[f"w{rows}"], {db.ROOT: tmp_path / "ckpt"}) == bits(tensor)
    (note,) = container.notes
    assert note.tensors == ("w7",)


def piece(tensor: Any, parts: int, index: int) -> Any:
    chunks = torch.chunk(tensor, parts, dim=0)
    return (chunks[index] if index < len(chunks) else tensor[:0]).clone()


@pytest.mark.parametrize("mesh", [(2, 2), (3, 2), (4, 2), (2, 4), (3, 4), (4, 4), (5, 3), (8, 2)], ids=str)
@pytest.mark.parametrize("replicas", [1, 2])
def test_wrong_boxes_of_torch_are_settled_for_every_length(mesh: tuple[int, int], replicas: int) -> None:
    """Every length up to 60, as torch's own function records it, of which one rank per recorded offset is kept."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as recorded_by_torch

    fsdp, tp = mesh
    layout = (_StridedShard(0, split_factor=tp), Shard(0))
    for length in range(1, 60):
        pieces: dict[int, tuple[Written, Box]] = {}
        rows = torch.arange(length)
        for rank in range(fsdp * tp):
            row, column = divmod(rank, tp)
            true = piece(piece(rows, tp, column), fsdp, row)
            sizes, offsets = recorded_by_torch((length, 3), mesh, [row, column], layout)
            start = int(true[0]) if len(true) else length
            written = Written(rank, Box(tuple(offsets), tuple(sizes)), (len(true), 3))
            pieces.setdefault(offsets[0], (written, Box((start, 0), (len(true), 3))))
        written_pieces, truth = zip(*pieces.values(), strict=True)
        if any(written.recorded.sizes != written.sizes for written in written_pieces):
            assert settle((length, 3), written_pieces, fsdp * tp * replicas) == list(truth), length


# Golden --------------------------------------------------------------------------------------------------------------


def test_every_golden_directory(larger_golden: Path) -> None:
    directories = sorted(path.parent for path in larger_golden.rglob(".metadata"))
    assert len(directories) > 30
    for directory in directories:
        assert_as_torch_loads(directory)
