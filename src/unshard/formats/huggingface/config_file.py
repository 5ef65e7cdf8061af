"""The config.json of the output: the source's bytes, but for what no longer holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from unshard.checkpoint import Note
from unshard.dtypes import BF16, BY_NAME, BY_TORCH_NAME, F16, F32, F64, DType
from unshard.errors import FormatError
from unshard.formats.huggingface.json_edit import remove_member, set_member
from unshard.tensors import Value

PLAIN_FLOATS: tuple[DType, ...] = (F16, BF16, F32, F64)
"""The types of weights as they are trained. They may be cast; the smaller floats hold quantised values."""

_QUANTISED = frozenset([dtype for name, dtype in BY_NAME.items() if name.startswith(("F8_", "F4", "U8", "I8", "I32"))])
"""The types of which quantised weights are made: small floats, bytes, and integers packed with several of them."""

_DTYPE_KEYS = ("dtype", "torch_dtype")
_QUANTIZATION = "quantization_config"

_Path: TypeAlias = tuple[str, ...]


def adapt_config(
    data: bytes, config: Mapping[str, Any], values: Sequence[Value], changes: Mapping[str, Any], place: Path
) -> tuple[bytes, tuple[Note, ...]]:
    """The bytes of a config.json that fits these output tensors, and a note for each change that the tensors asked for.

    data, config: the source's file, as bytes and parsed; `place` names it in errors.
    changes:      further members to set (None: to remove); dots lead into nested objects.
    """
    edits: dict[_Path, Any] = {}
    notes: list[Note] = []
    for path, old, new in _stale_dtypes(config, values):
        edits[path] = new
        notes.append(Note(f"config.json: {'.'.join(path)} is {new}, as the weights are; it said {old}"))
    for path in _stale_quantization(config, values):
        edits[path] = None
        notes.append(Note(f"config.json: {'.'.join(path)} was removed, as no tensor is quantised"))
    edits |= {_split_path(key, config): value for key, value in changes.items()}
    if not edits:
        return data, ()
    text = data.decode("utf-8")
    try:
        for path, value in edits.items():
            text = remove_member(text, path) if value is None else set_member(text, path, value)
    except ValueError as error:
        raise FormatError(f"{place}: {'.'.join(path)} must change, but cannot: {error}") from None
    return text.encode("utf-8"), tuple(notes)


def _split_path(key: str, config: Mapping[str, Any]) -> _Path:
    return (key,) if key in config else tuple(key.split("."))


def _parts(config: Mapping[str, Any]) -> Iterator[tuple[_Path, Mapping[str, Any]]]:
    """The config itself and the configs of its parts: `text_config`, `vision_config`, …"""
    yield (), config
    for name, part in config.items():
        if name.endswith("_config") and name != _QUANTIZATION and isinstance(part, Mapping):
            yield (name,), part


def _stale_dtypes(config: Mapping[str, Any], values: Sequence[Value]) -> Iterator[tuple[_Path, str, str]]:
    """Where a dtype is named that the output does not have, what it says, and what it must say.

    The model's own dtype is that of most bytes; a part's is wrong only if no tensor has it.
    """
    sizes: Counter[DType] = Counter()
    for value in values:
        if value.dtype in PLAIN_FLOATS:
            sizes[value.dtype] += value.size_in_bytes
    if not sizes:
        return
    main = max(PLAIN_FLOATS, key=lambda dtype: sizes[dtype])
    for path, part in _parts(config):
        right = sizes if path else {main}
        for key in _DTYPE_KEYS:
            said = part.get(key)
            dtype = BY_TORCH_NAME.get(said.removeprefix("torch.")) if isinstance(said, str) else None
            if isinstance(said, str) and dtype is not None and dtype not in right:
                prefix = "torch." if said.startswith("torch.") else ""
                yield (*path, key), said, prefix + main.torch_name


def _stale_quantization(config: Mapping[str, Any], values: Sequence[Value]) -> Iterator[_Path]:
    """Where a config says how weights are quantised that are not."""
    if values and not any(value.dtype in _QUANTISED for value in values):
        for path, part in _parts(config):
            if part.get(_QUANTIZATION) is not None:
                yield (*path, _QUANTIZATION)
