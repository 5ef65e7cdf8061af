"""Entries that are no tensors: anything that torch.save takes, as inert records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unshard.formats.dcp.transforms import refuse_transforms
from unshard.formats.torch_file import read_torch_file
from unshard.tensors import SourceFile


@dataclass(frozen=True, slots=True)
class Item:
    """`length` bytes of a file from byte `offset` on, in which torch.save put an object.

    `path` is what to open, `file` its name. `transforms` as in `metadata.Place`.
    """

    file: SourceFile
    path: Path
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


def read_item(item: Item) -> Any:
    """The object: dicts, lists, numbers, text and inert records. FormatError where it is damaged or hostile."""
    refuse_transforms(item.transforms, str(item.file))
    return read_torch_file(item.path, item.file, start=item.offset, length=item.length).root
