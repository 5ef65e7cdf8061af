"""What training recorded beside the tensors: arguments, iteration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unshard.errors import FormatError, UnshardError
from unshard.formats.dcp.objects import Item, read_item
from unshard.formats.megatron.distributed.file_names import COMMON
from unshard.formats.torch_file import read_torch_file
from unshard.tensors import SourceFile

COMMON_ITEM = "common_state/shard_0_1"
"""Where newer versions keep it, in a list of one (megatron-core `dist_checkpointing/serialization.py`)."""
_MEMBERS = ("args", "iteration")
"""Of a state dict that was flattened, each in an item of its own (`fsdp_dtensor`)."""


def read_common(
    directory: Path, root: str, items: Mapping[str, Item], problems: list[UnshardError]
) -> Mapping[Any, Any] | None:
    """The dict with `args`, `iteration` and more; None where there is none. What is damaged is added to `problems`."""
    try:
        if (directory / COMMON).is_file():
            found = read_torch_file(directory / COMMON, SourceFile(root, COMMON)).root
        elif COMMON_ITEM in items:
            found = read_item(items[COMMON_ITEM])
            found = found[0] if isinstance(found, list) and len(found) == 1 else found
        else:
            found = {member: read_item(items[member]) for member in _MEMBERS if member in items} or None
    except FormatError as error:
        problems.append(error)
        return None
    if found is not None and not isinstance(found, Mapping):
        problems.append(
            FormatError(f"{directory / COMMON}: holds a {type(found).__name__}, where Megatron keeps a dict")
        )
        return None
    return found
