"""What one weights file holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from unshard.errors import FormatError, UnshardError
from unshard.formats.hf_shards.sharding_info import SHARDING_INFO, is_whole
from unshard.formats.safetensors_file import read_header
from unshard.tensors import SourceFile, Tensor
from unshard.words import items_in_words, one_line, shorten


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of one weights file.

    skipped:    entries that are no tensors, with the reason.
    unrecorded: tensors of which the file does not record that they are whole.
    """

    tensors: Mapping[str, Tensor]
    skipped: Mapping[str, str] = field(default_factory=dict)
    unrecorded: Sequence[str] = ()
    problems: Sequence[UnshardError] = ()


def read_safetensors(path: Path, file: SourceFile) -> Contents:
    """The contents of a safetensors file. Raises FormatError where it cannot be read, or holds pieces of tensors."""
    header = read_header(path, file)
    if SHARDING_INFO not in header.metadata:
        return Contents(header.tensors)
    try:
        whole = is_whole(header.metadata)
    except ValueError as error:
        raise FormatError(f"{path}: {SHARDING_INFO} is malformed: {error}") from None
    if not whole:
        text = f"{path}: holds pieces of tensors, written by torch's distributed checkpoint, not a model"
        raise FormatError(text, hint="pieces are read from files that have their first names: shard-00001-model-…")
    return Contents(header.tensors, unrecorded=tuple(header.tensors))


def read_bin(path: Path, file: SourceFile) -> Contents:
    """The contents of a file of torch.save. Raises FormatError where it cannot be read."""
    from unshard.formats.state_dict import find_state_dict, is_tensor, read_whole, what_it_is
    from unshard.formats.torch_file import StoredTensor, UnsupportedTensor, read_torch_file

    state, skipped = find_state_dict(read_torch_file(path, file).root, str(path))
    tensors: dict[str, Tensor] = {}
    problems: list[UnshardError] = []
    for name, entry in state.items():
        if isinstance(entry, StoredTensor):
            try:
                tensors[name] = Tensor(name, entry.dtype, entry.shape, read_whole(entry, None))
            except FormatError as error:
                problems.append(error)
        elif isinstance(entry, UnsupportedTensor):
            problems.append(FormatError(f"{path}: {shown(name)}: this tensor {entry.reason}"))
        elif is_tensor(entry):
            problems.append(FormatError(f"{path}: {shown(name)} is a piece of a distributed tensor, not a whole one"))
        else:
            skipped[name] = what_it_is(entry)
    return Contents(tensors, skipped, problems=problems)


def some(names: Sequence[str]) -> str:
    """The first few of many names."""
    return items_in_words([shown(name) for name in names], 5)


def shown(name: str) -> str:
    """A name that strangers chose, fit to be printed."""
    return one_line(shorten(name, 200))
