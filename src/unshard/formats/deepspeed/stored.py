"""Tensors by name in DeepSpeed's files, and files that hold nothing else: experts', and a pipeline's layers'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from unshard.errors import FormatError, UnshardError
from unshard.formats.deepspeed.files import File, is_of_another_place
from unshard.formats.state_dict import find_state_dict, is_tensor, read_whole
from unshard.formats.torch_file import StoredTensor, UnsupportedTensor, read_torch_file
from unshard.tensors import Tensor
from unshard.words import items_in_lines

Read = TypeVar("Read")


def attempt(read: Callable[[], Read], problems: list[UnshardError]) -> Read | None:
    """What `read` gives; None, and a problem more, where it cannot be read."""
    try:
        return read()
    except FormatError as error:
        problems.append(error)
        return None


def read_content(file: File) -> Any:
    """The object in a file. Raises FormatError where none can be read, and where it is another rank's.

    Of partitions of stage 3, only the name tells the rank, and torch.save keeps the name that it wrote to.
    """
    read = read_torch_file(file.path, file.name)
    if is_of_another_place(file.path.name, read.saved_as):
        raise FormatError(
            f"{file.name}: was saved as {read.saved_as}.pt, which is another place: files were swapped or renamed",
            hint="give the files the names under which they were saved, or fetch them again",
        )
    return read.root


def read_state(file: File, rank: int, problems: list[UnshardError]) -> dict[str, Tensor]:
    """The tensors of a file, whole, as rank `rank` of the model-parallel ones stored them.

    What cannot be read is added to `problems`; then the file is taken for empty.
    """
    return attempt(partial(_read, file, rank), problems) or {}


def _read(file: File, rank: int) -> dict[str, Tensor]:
    content, _ = find_state_dict(read_content(file), str(file.name))
    read: dict[str, Tensor] = {}
    wrong: list[str] = []
    for name, value in content.items():
        try:
            tensor = read_entry(name, value, rank)
        except FormatError as error:
            wrong.append(f"{name}: {error.message}")
            continue
        if tensor is not None:
            read[name] = tensor
    if wrong:
        raise unreadable(wrong, file)
    return read


def read_entry(name: str, value: object, rank: int | None) -> Tensor | None:
    """The tensor of an entry, whole; None where it is no tensor. Raises FormatError where it cannot be read."""
    if isinstance(value, StoredTensor):
        return Tensor(name, value.dtype, value.shape, read_whole(value, rank))
    if is_tensor(value):
        reason = value.reason if isinstance(value, UnsupportedTensor) else "is of a class that is not read"
        raise FormatError(f"this tensor {reason}")
    return None


def unreadable(lines: Sequence[str], file: File) -> FormatError:
    """The error of entries that cannot be read, of which each line names one and says why."""
    return FormatError(f"{file.name}: entries that cannot be read:\n{items_in_lines(lines)}")
