"""Checkpoints that torch itself lays out and saves, on meshes that the golden ones do not have.

A fake process group stands for each rank in turn: torch builds the mesh, cuts the tensors and writes the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assembled import gather
from unshard.checkpoint import Checkpoint
from unshard.formats.contract import Source
from unshard.formats.fsdp import Fsdp

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch", minversion="2.5")

StateDict = dict[str, Any]
SHAPES = {"even": (24, 8), "uneven": (7, 5), "few": (2, 3), "one": (1,), "deep": (5, 4, 6)}


@contextmanager
def rank_of(rank: int, world: int) -> Iterator[None]:
    """Be one rank of a world that is not there."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def save_ranks(directory: Path, world: int, state_of: Callable[[int], StateDict]) -> Checkpoint:
    for rank in range(world):
        with rank_of(rank, world):
            torch.save(state_of(rank), directory / f"model_world_size_{world}_rank_{rank}.pt")
    return Fsdp().read(Source(directory))


def whole(shape: tuple[int, ...]) -> Any:
    return torch.arange(prod(shape), dtype=torch.float32).reshape(shape)


def check(checkpoint: Checkpoint, shapes: dict[str, tuple[int, ...]]) -> None:
    assert [str(problem) for problem in checkpoint.problems] == []
    assert list(checkpoint.tensors) == list(shapes)
    for name, shape in shapes.items():
        assert gather(checkpoint.tensors[name], checkpoint.roots) == whole(shape).numpy().tobytes(), name


@pytest.mark.parametrize(
    ("mesh", "dims"),
    [
        ((5,), (0,)),
        ((3,), (-1,)),
        ((2, 3), (None, 0)),
        ((3, 2), (0, -1)),
        ((2, 3), (0, 0)),
        ((2, 2, 2), (0, None, 0)),
        ((2, 1, 3), (0, 0, None)),
        ((2, 2), (None, None)),
    ],
)
def test_what_torch_distributes(mesh: tuple[int, ...], dims: tuple[int | None, ...], tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def state_of(_rank: int) -> StateDict:
        device_mesh = init_device_mesh(
            "cpu", mesh, mesh_dim_names=tuple(f"axis{number}" for number in range(len(mesh)))
        )
        placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
        return {
            name: distribute_tensor(whole(shape), device_mesh, placements, src_data_rank=None)
            for name, shape in SHAPES.items()
        }

    checkpoint = save_ranks(tmp_path, prod(mesh), state_of)
    check(checkpoint, SHAPES)
    assert checkpoint.mesh == tuple((f"axis{number}", size) for number, size in enumerate(mesh))
    assert checkpoint.world_size == prod(mesh)


@pytest.mark.parametrize(("outer", "inner"), [(2, 2), (3, 2), (4, 2), (2, 4)])
def test_fsdp2_on_tensor_parallelism_of_every_length(outer: int, inner: int, tmp_path: Path) -> None:
    """Tensor parallelism cuts first, then FSDP2, whatever the placement formula says of lengths that do not divide."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    shapes = {f"rows{length}": (length, 2) for length in range(1, 24)}

    def piece(tensor: Any, count: int, index: int) -> Any:
        parts = tensor.chunk(count)
        return parts[index] if index < len(parts) else tensor[:0]

    def state_of(rank: int) -> StateDict:
        mesh = init_device_mesh("cpu", (outer, inner), mesh_dim_names=("fsdp", "tp"))
        state = {}
        for name, shape in shapes.items():
            local = piece(piece(whole(shape), inner, rank % inner), outer, rank // inner).clone()
            placements = [_StridedShard(0, split_factor=inner), Shard(0)]
            state[name] = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
            )
        return state

    check(save_ranks(tmp_path, outer * inner, state_of), shapes)


def test_slices_and_flattened_dimensions_of_a_mesh(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    shapes = {"inner": (7, 3), "outer": (5, 2), "flat": (9, 2)}

    def state_of(_rank: int) -> StateDict:
        root = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        flat = root["dp", "tp"]._flatten("both")
        meshes = {"inner": root["tp"], "outer": root["pp"], "flat": flat}
        return {
            name: distribute_tensor(whole(shape), meshes[name], [Shard(0)], src_data_rank=None)
            for name, shape in shapes.items()
        }

    check(save_ranks(tmp_path, 8, state_of), shapes)


def test_plain_tensors_beside_sharded_ones(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    def state_of(_rank: int) -> StateDict:
        mesh = init_device_mesh("cpu", (2,))
        return {"w": distribute_tensor(whole((3, 2)), mesh, [Shard(0)], src_data_rank=None), "b": whole((4,)), "n": 7}

    checkpoint = save_ranks(tmp_path, 2, state_of)
    check(checkpoint, {"w": (3, 2), "b": (4,)})
    assert checkpoint.skipped == {"n": "no tensor, but the value 7"}


def test_transposed_and_shifted_local_tensors(tmp_path: Path) -> None:
    """A local tensor may be any view of its storage; FSDP2's are views of padded ones."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    def state_of(rank: int) -> StateDict:
        mesh = init_device_mesh("cpu", (2,))
        half = whole((6, 4))[rank * 3 : rank * 3 + 3]
        padded = torch.full((5, 4), -1.0)
        padded[1:4] = half
        state = {}
        for name, view in {"narrow": padded.narrow(0, 1, 3), "transposed": half.t().contiguous().t()}.items():
            state[name] = DTensor.from_local(
                half.clone(), mesh, [Shard(0)], run_check=False, shape=torch.Size((6, 4)), stride=(4, 1)
            )
            state[name]._local_tensor = view
        return state

    check(save_ranks(tmp_path, 2, state_of), {"narrow": (6, 4), "transposed": (6, 4)})


def test_partial_tensors_are_refused(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Partial

    def state_of(_rank: int) -> StateDict:
        mesh = init_device_mesh("cpu", (2,))
        return {"w": DTensor.from_local(whole((4,)), mesh, [Partial()], run_check=False)}

    checkpoint = save_ranks(tmp_path, 2, state_of)
    assert ["placement Partial" in problem.message for problem in checkpoint.problems] == [True, True]


def test_ranks_that_inferred_different_global_shapes_are_named(tmp_path: Path) -> None:
    """`DTensor.from_local` of uneven pieces multiplies each rank's own size."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    def state_of(rank: int) -> StateDict:
        mesh = init_device_mesh("cpu", (2,))
        return {"w": DTensor.from_local(whole((3 - rank, 2)), mesh, [Shard(0)], run_check=False)}

    checkpoint = save_ranks(tmp_path, 2, state_of)
    text = "\n".join(problem.message for problem in checkpoint.problems)
    assert "w: the ranks disagree on its shape: (6, 2) on rank 0, (4, 2) on rank 1" in text


def test_every_kind_of_number(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dtypes = [torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64]
    expected = {str(dtype): torch.arange(10).reshape(5, 2).to(dtype) for dtype in dtypes}

    def state_of(_rank: int) -> StateDict:
        mesh = init_device_mesh("cpu", (3,))
        return {
            name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None) for name, tensor in expected.items()
        }

    checkpoint = save_ranks(tmp_path, 3, state_of)
    assert checkpoint.problems == ()
    for name, tensor in expected.items():
        stored = np.frombuffer(gather(checkpoint.tensors[name], checkpoint.roots), np.uint8)
        assert stored.tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes()
