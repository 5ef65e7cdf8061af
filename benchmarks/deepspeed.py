"""A Llama as DeepSpeed saves it from four ranks under ZeRO-2 and ZeRO-3, trained in bf16 with fp32 masters and Adam.

The files hold what DeepSpeed puts there (its `runtime/zero/stage_1_and_2.py`, `stage3.py` and `engine.py`), but for the
objects of its own classes, and are written by PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.models import Shape

SHAPES = {
    "0.5": Shape(1024, 2816, 8, 16_000, heads=16, groups=16, dtype="F32"),
    "2": Shape(1536, 4096, 15, 32_000, heads=24, groups=24, dtype="F32"),
}
"""By their size in GB, of the masters."""

_WORLD = 4
_TAG = "global_step100"
_VERSION = "0.19.8"


def write_zero2(shape: Shape, root: Path) -> None:
    """`run`, with one file of bf16 weights, and four of one flat group: masters and two moments."""
    tag = _begin(root)
    flat = np.concatenate([values.ravel() for _, values in shape.draw()])
    step = -(-len(flat) // (2 * _WORLD)) * 2
    for rank in range(_WORLD):
        part = flat[rank * step : (rank + 1) * step]
        state = {
            "zero_stage": 2,
            "partition_count": [_WORLD],
            "single_partition_of_fp32_groups": [_tensor(part)],
            "group_paddings": [step - len(part)],
            "base_optimizer_state": {"state": {0: _moments(step)}, "param_groups": [{"lr": 0.0}]},
        }
        _save_rank(root, tag, rank, state, part)
    _save({**_model_states(shape), "module": dict(_weights(shape))}, tag / "mp_rank_00_model_states.pt")


def write_zero3(shape: Shape, root: Path) -> None:
    """`run`, with placeholders instead of weights, and in each rank's file its part of every parameter."""
    tag = _begin(root)
    for rank in range(_WORLD):
        part = np.concatenate([_part(values.ravel(), rank) for _, values in shape.draw()])
        state = {
            "zero_stage": 3,
            "partition_count": _WORLD,
            "fp32_flat_groups": [_tensor(part)],
            "optimizer_state_dict": {"state": {0: _moments(len(part))}, "param_groups": [{"lr": 0.0}]},
        }
        _save_rank(root, tag, rank, state, part)
        placeholders = {name: _tensor(np.empty(0, np.uint16)) for name, _ in shape.tensors()}
        file = tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        _save({**_model_states(shape), "module": placeholders}, file)


def _begin(root: Path) -> Path:
    """The directories of a run with one tag, and of what the baseline copies."""
    tag = root / "run" / _TAG
    tag.mkdir(parents=True, exist_ok=True)
    (root / "masters").mkdir(exist_ok=True)
    (root / "run" / "latest").write_text(_TAG)
    return tag


def _save_rank(root: Path, tag: Path, rank: int, state: dict[str, Any], masters: np.ndarray) -> None:
    """A rank's optimizer file, and beside the run its masters alone: the bytes that belong to the model."""
    whole = {"optimizer_state_dict": state | {"ds_version": _VERSION}, "ds_config": {}, "ds_version": _VERSION}
    _save(whole, tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    masters.tofile(root / "masters" / f"rank_{rank}")


def _part(flat: np.ndarray, rank: int) -> np.ndarray:
    """What a rank holds of a parameter under ZeRO-3; the last ones are padded."""
    step = -(-len(flat) // _WORLD)
    part = flat[rank * step : (rank + 1) * step]
    return np.pad(part, (0, step - len(part)))


def _moments(length: int) -> dict[str, Any]:
    return {name: _tensor(np.zeros(length, np.float32)) for name in ("exp_avg", "exp_avg_sq")}


def _model_states(shape: Shape) -> dict[str, Any]:
    import torch

    return {
        "buffer_names": [],
        "param_shapes": [{name: torch.Size(sizes) for name, sizes in shape.tensors()}],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "dp_world_size": _WORLD,
        "mp_world_size": 1,
        "global_steps": 100,
        "ds_config": {"bf16": {"enabled": True}},
        "ds_version": _VERSION,
    }


def _weights(shape: Shape) -> Iterator[tuple[str, Any]]:
    import torch

    for name, values in shape.draw():
        yield name, torch.from_numpy(values.copy()).to(torch.bfloat16)


def _tensor(values: np.ndarray) -> Any:
    import torch

    if values.dtype == np.uint16:
        return torch.from_numpy(values.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(values.copy())


def _save(content: Any, path: Path) -> None:
    import torch

    torch.save(content, path)
