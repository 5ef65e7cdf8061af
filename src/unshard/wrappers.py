"""Modules that training wrappers insert into parameter names, anywhere on the way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

COMPONENTS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
"""FSDP1 (torch `distributed/fsdp/_common_utils.py`), activation checkpointing, and torch.compile."""

T = TypeVar("T")


def strip_components(name: str) -> str:
    """A name without the modules that wrappers insert."""
    if not any(component in name for component in COMPONENTS):
        return name
    return ".".join([part for part in name.split(".") if part not in COMPONENTS])


def strip_all(tensors: Mapping[str, T]) -> Mapping[str, T]:
    """All entries under names without wrappers; as they are, where two of them would get one name."""
    stripped = {strip_components(name): tensor for name, tensor in tensors.items()}
    return stripped if len(stripped) == len(tensors) else tensors
