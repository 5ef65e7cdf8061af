"""Files that hold nothing but tensors by name: those of experts, and those of a pipeline's layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from unshard.errors import FormatError, UnshardError
from unshard.formats.deepspeed.files import File
from unshard.formats.state_dict import find_state_dict, is_tensor, read_whole
from unshard.formats.torch_file import StoredTensor, UnsupportedTensor, read_torch_file
from unshard.tensors import Tensor
from unshard.words import items_in_lines

_LISTED = 20


def read_state(file: File, rank: int, problems: list[UnshardError]) -> dict[str, Tensor]:
    """The tensors of a file, whole, as rank `rank` of the model-parallel ones stored them.

    What cannot be read is added to `problems`; then the file is taken for empty.
    """
    try:
        content, _ = find_state_dict(read_torch_file(file.path, file.name).root, str(file.name))
        return _read(content, file, rank)
    except FormatError as error:
        problems.append(error)
        return {}


def _read(content: Mapping[str, object], file: File, rank: int) -> dict[str, Tensor]:
    read: dict[str, Tensor] = {}
    wrong: list[str] = []
    for name, value in content.items():
        if isinstance(value, StoredTensor):
            try:
                read[name] = Tensor(name, value.dtype, value.shape, read_whole(value, rank))
            except FormatError as error:
                wrong.append(f"{name}: {error.message}")
        elif is_tensor(value):
            reason = value.reason if isinstance(value, UnsupportedTensor) else "is of a class that is not read"
            wrong.append(f"{name}: this tensor {reason}")
    _refuse(wrong, file)
    return read


def _refuse(wrong: Iterable[str], file: File) -> None:
    lines = list(wrong)
    if lines:
        raise FormatError(f"{file.name}: entries that cannot be read:\n{items_in_lines(lines, _LISTED)}")
