"""A catalog's tensors as torch tensors, and what a canonical Megatron catalog must hold of whole tensors."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch

from assembled import gather
from unshard.checkpoint import Checkpoint
from unshard.tensors import Tensor


def as_torch(tensor: Tensor, roots: Mapping[str, Path]) -> torch.Tensor:
    """The tensor's values."""
    data = bytearray(gather(tensor, roots))
    dtype = getattr(torch, tensor.dtype.torch_name)
    return torch.frombuffer(data, dtype=dtype).reshape(tensor.shape) if data else torch.empty(tensor.shape, dtype=dtype)


def canonical(full: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors with the experts of each layer stacked by their global numbers."""
    whole: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    for name, tensor in full.items():
        found = re.fullmatch(r"(.*\.experts)\.local_experts\.(\d+)\.(.+)", name)
        if found is None:
            whole[name] = tensor
        else:
            experts[f"{found[1]}.{found[3]}"][int(found[2])] = tensor
    return whole | {name: torch.stack([each[n] for n in range(len(each))]) for name, each in experts.items()}


def assert_holds(checkpoint: Checkpoint, full: Mapping[str, torch.Tensor]) -> None:
    """The catalog is whole and holds exactly these tensors, bit for bit."""
    assert checkpoint.problems == ()
    expected = canonical(full)
    assert sorted(checkpoint.tensors) == sorted(expected)
    for name, tensor in checkpoint.tensors.items():
        found = as_torch(tensor, checkpoint.roots)
        assert (found.dtype, found.shape) == (expected[name].dtype, expected[name].shape), name
        assert torch.equal(_bits(found), _bits(expected[name])), f"{name}: other values"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes, so that NaN equals NaN."""
    return tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor.reshape(1).view(torch.uint8)
