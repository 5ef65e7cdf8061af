"""What kind of distributed checkpoint lies in a directory, told by file names and a look into small files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from unshard.errors import FormatError
from unshard.formats.huggingface.assets import read_config
from unshard.formats.megatron.distributed.file_names import ARRAY, COMMON, SEAL

Backend: TypeAlias = Literal["torch_dist", "zarr"]

_BACKEND = "sharded_backend"
_METADATA = ".metadata"
_LOOK = 4 << 20
"""Bytes of `.metadata` that are looked into. It begins with the keys, the model's before the optimizer's."""
_END_OF_KEYS = b"planner_data"
"""The member of `Metadata` that follows: paths in the nested state dict, whose steps look like keys."""
_TEXT = rb"(?:\x8c.|X.{4}|\x8d.{8})"
"""What comes before a text in a pickle: the opcode and the length."""
_MODULES = (
    rb"(?:language_model\.)?(?:embedding\.word_embeddings\.|decoder\.layers\.(?:\d+\.)?(?:self_attention\."
    rb"(?:linear_|in_proj)|mlp\.(?:linear_fc|experts\.|router\.|shared_experts\.)))"
)
"""Names that megatron-core gives and no model of transformers has: there, decoders have `self_attn` and `fc1`."""
_CORE_KEY = re.compile(_TEXT + rb"(?:module\.)*" + _MODULES, re.DOTALL)
_FSDP_KEY = re.compile(_TEXT + rb"model\d*\.(?:module\.)*" + _MODULES, re.DOTALL)


@dataclass(frozen=True, slots=True)
class Finding:
    """What lies in a directory. `backend`: the recorded one, which may be unknown; `finished`: whether it is sealed."""

    backend: str
    finished: bool


def find_distributed(directory: Path) -> Finding | None:
    """What megatron-core's `dist_checkpointing` wrote there, finished or not; None where it wrote nothing."""
    if (directory / SEAL).is_file():
        try:
            recorded = read_config(directory / SEAL).get(_BACKEND)
        except FormatError:
            recorded = None
        if isinstance(recorded, str):
            return Finding(recorded, finished=True)
    if not ((directory / COMMON).is_file() or _has_key(directory, _CORE_KEY)):
        return None
    backend = _find_backend(directory)
    return Finding(backend, finished=False) if backend else None


def is_fsdp(directory: Path) -> bool:
    """Whether a torch DCP directory holds a megatron-core model under the keys of Megatron-FSDP."""
    return not (directory / SEAL).is_file() and _has_key(directory, _FSDP_KEY)


def _find_backend(directory: Path) -> Backend | None:
    """The backend by the files that it leaves."""
    names = [entry.name for entry in directory.iterdir()]
    if any(name.startswith(_METADATA) or name.endswith((_METADATA, ".distcp")) for name in names):
        return "torch_dist"
    return "zarr" if any((directory / name / ARRAY).is_file() for name in names) else None


def _has_key(directory: Path, pattern: re.Pattern[bytes]) -> bool:
    path = directory / _METADATA
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return pattern.search(file.read(_LOOK).partition(_END_OF_KEYS)[0]) is not None
