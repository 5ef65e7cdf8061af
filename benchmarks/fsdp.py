"""A Llama of fp32 weights, as four FSDP2 ranks would have saved it through verl.

The rank files are written by PyTorch itself, with real DTensors. Four ranks need no four processes for that: a fake
process group lets one process be each of them in turn.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.models import Shape

SHAPES = {
    "0.5": Shape(1024, 2816, 8, 16_000, heads=16, groups=16, dtype="F32"),
    "2": Shape(1536, 4096, 15, 32_000, heads=24, groups=24, dtype="F32"),
}
"""By their size in GB."""

_WORLD = 4

_TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "unshard": 1}, "unk_token": "<unk>"},
}
"""The least that transformers loads: some peers insist on a tokenizer."""


def write(shape: Shape, root: Path) -> None:
    """`actor`, verl's layout."""
    source = root / "actor"
    (source / "huggingface").mkdir(parents=True, exist_ok=True)
    (source / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": _WORLD}))
    (source / "huggingface" / "tokenizer.json").write_text(json.dumps(_TOKENIZER))
    (source / "huggingface" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    for rank in range(_WORLD):
        _save_rank(shape, rank, source / f"model_world_size_{_WORLD}_rank_{rank}.pt")


def _save_rank(shape: Shape, rank: int, path: Path) -> None:
    """What one rank saves: torch.save of a sharded state dict."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=_WORLD, store=FakeStore())
    mesh = init_device_mesh("cpu", (_WORLD,), mesh_dim_names=("fsdp",))
    state: dict[str, torch.Tensor] = {}
    for name, whole in shape.draw():
        step = -(-whole.shape[0] // _WORLD)
        local = torch.from_numpy(whole[rank * step : (rank + 1) * step].copy())
        sizes = torch.Size(whole.shape)
        strides = torch.empty(sizes, device="meta").stride()
        state[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=sizes, stride=strides)
    torch.save(state, path)
    dist.destroy_process_group()
