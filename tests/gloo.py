"""Several processes of torch that talk to each other, for tests of what they save together."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def run_ranks(world: int, save: Callable[[int], None], directory: Path) -> None:
    """Run `save` in as many processes, which meet in `directory`."""
    import torch

    def child(rank: int) -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        torch.set_num_threads(1)
        store = torch.distributed.FileStore(str(directory / "store"), world)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
        save(rank)
        torch.distributed.destroy_process_group()

    torch.multiprocessing.start_processes(lambda rank: child(rank), nprocs=world, start_method="fork")
