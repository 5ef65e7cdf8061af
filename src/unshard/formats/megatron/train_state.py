"""Megatron-Bridge's `latest_train_state.pt`: a dict of scalars, the step among them.

Source: NVIDIA-NeMo/Megatron-Bridge src/megatron/bridge/training/state.py (`TrainState.state_dict`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from unshard.dtypes import I32, I64
from unshard.errors import FormatError
from unshard.formats.torch_file import StoredTensor, read_torch_file
from unshard.tensors import SourceFile


def read_step(path: Path) -> int | None:
    """The step that a train state tells of, or None where it tells none, or cannot be read."""
    try:
        state = read_torch_file(path, SourceFile("run", path.name)).root
        step = state.get("step") if isinstance(state, Mapping) else None
        if isinstance(step, StoredTensor):
            step = _read_scalar(path, step)
    except (FormatError, OSError):
        return None
    return step if type(step) is int and step >= 0 else None


def _read_scalar(path: Path, tensor: StoredTensor) -> int | None:
    if tensor.shape not in ((), (1,)) or tensor.dtype not in (I32, I64):
        return None
    size = tensor.dtype.itemsize
    with path.open("rb") as file:
        file.seek(tensor.storage.offset + tensor.offset * size)
        return int.from_bytes(file.read(size), "little", signed=True)
