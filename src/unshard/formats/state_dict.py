"""State dicts as the `.pt` reader finds them: where the tensors are, and what else lies between them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from unshard.errors import FormatError
from unshard.formats.torch_file.records import Global, Opaque, StoredTensor, UnsupportedTensor, WrapperSubclass
from unshard.tensors import Box, Chunk, Extent

NESTING_KEYS = ("model", "state_dict", "module", "model_state_dict")
"""Under which trainers put the model's state dict beside the optimizer's."""

MAX_ENTRIES = 500_000
"""Of one state dict. The largest models, with every expert by itself, have a fifth of that."""

QUANTISERS = frozenset({"bitsandbytes", "torchao", "transformer_engine", "hqq", "quanto", "optimum"})
"""Packages whose Tensor subclasses hold packed values: `Params4bit`, `Float8Tensor`, … Other subclasses are plain."""


def find_state_dict(root: Any, place: str) -> tuple[Mapping[str, Any], dict[str, str]]:
    """The model's state dict in what a file holds, and what was left out beside it, with the reason.

    A dict without tensors of its own and with a dict under one of `NESTING_KEYS` stands for that dict. Keys that are no
    strings are left out. Raises FormatError where the file holds no dict at all; `place` is the file, for the message.
    """
    if isinstance(root, Opaque):
        raise FormatError(
            f"{place}: holds an object of class {root.cls.path}, not a state dict",
            hint="save model.state_dict() instead of the model; pickled objects are never brought to life here",
        )
    if not isinstance(root, Mapping):
        raise FormatError(f"{place}: holds a {type(root).__name__}, not a state dict")
    left_out: dict[str, str] = {}
    if not any(is_tensor(value) for value in root.values()):
        nested = [key for key in NESTING_KEYS if isinstance(root.get(key), Mapping)]
        if nested:
            left_out = {str(key): f"lies beside the model's {nested[0]!r}" for key in root if key != nested[0]}
            root = root[nested[0]]
    if len(root) > MAX_ENTRIES:
        raise FormatError(f"{place}: a state dict of {len(root):,} entries; at most {MAX_ENTRIES:,} are read")
    names = {name: value for name, value in root.items() if isinstance(name, str)}
    left_out |= {repr(name): "its key is not a name" for name in root if not isinstance(name, str)}
    return names, left_out


def is_tensor(value: Any) -> bool:
    """Whether an entry is a tensor, be it one that cannot be read; anything else is skipped."""
    return isinstance(value, (StoredTensor, WrapperSubclass, UnsupportedTensor))


def what_it_is(value: Any) -> str:
    """An entry that is no tensor, in a few words."""
    if isinstance(value, Opaque):
        return f"an object of class {value.cls.path}"
    if isinstance(value, Global):
        return f"the name {value.path}"
    if isinstance(value, Mapping):
        return f"a dict of {len(value)} entries"
    if value is None or isinstance(value, (bool, int, float)):
        return f"the value {value!r}"
    return f"a {type(value).__name__}"


def read_chunk(tensor: StoredTensor, box: Box, local: Box, rank: int | None) -> Chunk:
    """The chunk of a stored tensor whose elements `local` are the elements `box` of the whole.

    Raises FormatError for tensors whose stored elements are not their values.
    """
    if tensor.cls is not None and tensor.cls.module.partition(".")[0] in QUANTISERS:
        raise FormatError(
            f"a {tensor.cls.path}, whose bytes are packed and mean nothing without its scales",
            hint="dequantise the model in the framework that trained it, and save its state dict again",
        )
    size, storage = tensor.dtype.itemsize, tensor.storage
    start = tensor.offset + sum([a * b for a, b in zip(local.offsets, tensor.strides, strict=True)])
    strides = tuple([stride * size for stride in tensor.strides])
    return Chunk(box, Extent(storage.file, storage.offset + start * size, strides, tensor.dtype), rank)


def read_whole(tensor: StoredTensor, rank: int | None) -> tuple[Chunk, ...]:
    """A stored tensor as the only chunk of itself; none if it has no elements."""
    box = Box.whole(tensor.shape)
    return (read_chunk(tensor, box, box, rank),) if prod(tensor.shape) else ()
