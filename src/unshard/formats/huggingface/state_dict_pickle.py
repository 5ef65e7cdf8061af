"""The pickle of a state dict, as torch.save writes it, without PyTorch.

Only opcodes that `torch.load(weights_only=True)` accepts are used: protocol 2, an OrderedDict of names and
`_rebuild_tensor_v2` calls (torch/_utils.py), each on a storage of its own whose key is the tensor's number.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod

from unshard.dtypes import DType
from unshard.formats.torch_file.storages import STORAGE_TYPES
from unshard.tensors.box import row_major_strides

_STORAGE_CLASSES = {dtype: name for name, dtype in STORAGE_TYPES.items() if dtype}
"""Typed storages. All other dtypes lie in an UntypedStorage and are named by `_rebuild_tensor_v3` (since torch 2.2)."""


def pickle_state_dict(entries: Sequence[tuple[str, DType, tuple[int, ...]]]) -> bytes:
    """The `data.pkl` of contiguous tensors (name, dtype, shape in items); tensor i lies in the storage `str(i)`."""
    writer = _Writer()
    writer.ordered_dict()
    writer.raw(b"(")
    for number, (name, dtype, shape) in enumerate(entries):
        writer.text(name)
        _write_tensor(writer, str(number), dtype, shape)
    writer.raw(b"u.")
    return bytes(writer.data)


def _write_tensor(writer: _Writer, key: str, dtype: DType, shape: tuple[int, ...]) -> None:
    storage_class = _STORAGE_CLASSES.get(dtype)
    writer.name("torch._utils", "_rebuild_tensor_v2" if storage_class else "_rebuild_tensor_v3")
    writer.raw(b"(")
    _write_storage(writer, storage_class, key, prod(shape) * (1 if storage_class else dtype.itemsize))
    writer.integer(0)
    writer.integers(shape)
    writer.integers(row_major_strides(shape))
    writer.raw(b"\x89")  # requires_grad=False
    writer.ordered_dict()  # no backward hooks
    if not storage_class:
        writer.name("torch", dtype.torch_name)
    writer.raw(b"tR")


def _write_storage(writer: _Writer, storage_class: str | None, key: str, numel: int) -> None:
    """The persistent id `("storage", class, key, location, numel)`; untyped storages count bytes."""
    writer.raw(b"(")
    writer.text("storage", again=True)
    if storage_class:
        writer.name("torch", storage_class)
    else:
        writer.name("torch.storage", "UntypedStorage")
    writer.text(key)
    writer.text("cpu", again=True)
    writer.integer(numel)
    writer.raw(b"tQ")


class _Writer:
    """Opcodes of pickle protocol 2. What is written often is remembered in the memo."""

    def __init__(self) -> None:
        self.data = bytearray(b"\x80\x02")
        self._memo: dict[bytes, int] = {}

    def raw(self, opcodes: bytes) -> None:
        self.data += opcodes

    def name(self, module: str, name: str) -> None:
        """A class or function."""
        self._remembered(f"c{module}\n{name}\n".encode("ascii"))

    def text(self, text: str, *, again: bool = False) -> None:
        """A string; one that comes `again` and again goes to the memo."""
        encoded = text.encode("utf-8")
        opcodes = b"X" + struct.pack("<I", len(encoded)) + encoded
        if again:
            self._remembered(opcodes)
        else:
            self.raw(opcodes)

    def integer(self, value: int) -> None:
        """An integer >= 0."""
        if value < 1 << 8:
            self.raw(b"K" + struct.pack("<B", value))
        elif value < 1 << 16:
            self.raw(b"M" + struct.pack("<H", value))
        elif value < 1 << 31:
            self.raw(b"J" + struct.pack("<i", value))
        else:
            encoded = value.to_bytes(value.bit_length() // 8 + 1, "little")
            self.raw(b"\x8a" + struct.pack("<B", len(encoded)) + encoded)

    def integers(self, values: Sequence[int]) -> None:
        """A tuple of integers >= 0."""
        if not values:
            self.raw(b")")
            return
        self.raw(b"(")
        for value in values:
            self.integer(value)
        self.raw(b"t")

    def ordered_dict(self) -> None:
        """An empty OrderedDict."""
        self.name("collections", "OrderedDict")
        self.raw(b")R")

    def _remembered(self, opcodes: bytes) -> None:
        place = self._memo.get(opcodes)
        if place is None:
            self._memo[opcodes] = place = len(self._memo)
            self.raw(opcodes + b"q" + struct.pack("<B", place))
        else:
            self.raw(b"h" + struct.pack("<B", place))
