"""A few forked processes with gloo between them: a distributed training job on one machine without a GPU."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_TIMEOUT = 180.0
"""Seconds; a case takes one or two."""


def run_ranks(work: Callable[..., None], world: int, *arguments: Any) -> None:
    """Call `work(rank, *arguments)` in `world` forked processes, with the process group up; raise if any of them fails.

    Fork, not spawn: the ranks inherit the model and the imports, which makes a world of eight cheap.
    """
    torch.set_num_threads(1)
    context = mp.start_processes(
        _rank, (work, world, _free_port(), arguments), nprocs=world, join=False, start_method="fork"
    )
    assert context is not None
    end = time.monotonic() + _TIMEOUT
    while not context.join(timeout=5):
        if time.monotonic() > end:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"{world} ranks did not finish within {_TIMEOUT:.0f} seconds")


def _rank(rank: int, work: Callable[..., None], world: int, port: int, arguments: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        work(rank, *arguments)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
