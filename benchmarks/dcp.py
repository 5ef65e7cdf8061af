"""A Llama of fp32 weights as torch's DCP saves it from four FSDP2 ranks, in both of its containers.

As `.metadata` and `.distcp` files, where and under the names that accelerate gives them, and as the safetensors shards
of `HuggingFaceStorageWriter`. Both are written by PyTorch itself, from four processes.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.models import Shape

if TYPE_CHECKING:
    import torch

SHAPES = {
    "0.5": Shape(1024, 2816, 8, 16_000, heads=16, groups=16, dtype="F32"),
    "2": Shape(1536, 4096, 15, 32_000, heads=24, groups=24, dtype="F32"),
}
"""By their size in GB."""

_WORLD = 4


def write_accelerate(shape: Shape, root: Path) -> None:
    """`state`, a directory of `accelerator.save_state` as far as the model goes."""
    _save(_save_items, shape, root / "state" / "pytorch_model_fsdp_0")


def write_shards(shape: Shape, root: Path) -> None:
    """`shards`, one safetensors file per rank."""
    _save(_save_safetensors, shape, root / "shards")


def _save(save: Callable[[dict[str, Any], Path], None], shape: Shape, directory: Path) -> None:
    import torch.multiprocessing as processes

    directory.mkdir(parents=True, exist_ok=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes.spawn(_save_rank, (save, shape, directory, port), _WORLD)


def _save_rank(
    rank: int, save: Callable[[dict[str, Any], Path], None], shape: Shape, directory: Path, port: int
) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=_WORLD)
    save(_shard(shape, rank), directory)
    dist.barrier()  # who leaves early tears the others' connections
    dist.destroy_process_group()


def _shard(shape: Shape, rank: int) -> dict[str, torch.Tensor]:
    """The state dict of one rank: every tensor a DTensor that is cut along its rows."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (_WORLD,), mesh_dim_names=("fsdp",))
    state: dict[str, torch.Tensor] = {}
    for name, whole in shape.draw():
        step = -(-whole.shape[0] // _WORLD)
        local = torch.from_numpy(whole[rank * step : (rank + 1) * step].copy())
        sizes = torch.Size(whole.shape)
        strides = torch.empty(sizes, device="meta").stride()
        state[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=sizes, stride=strides)
    return state


def _save_items(state: dict[str, Any], directory: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": state}, checkpoint_id=str(directory))


def _save_safetensors(state: dict[str, Any], directory: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(directory), save_distributed=True))
