"""Reading safetensors files by hand: an oracle that shares no code with what it judges."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy

_FLOATS = {"F32": numpy.dtype("<f4"), "F16": numpy.dtype("<f2"), "BF16": numpy.dtype(ml_dtypes.bfloat16)}
_ULPS = {"F32": 2.0**-19, "F16": 2.0**-10, "BF16": 2.0**-7}
"""What computed values may differ by, relative to their size: one step of the type, or the order of a sum in fp32."""


@dataclass(frozen=True)
class Stored:
    """A tensor as it lies in a file: dtype by its safetensors name, shape, bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def values(self) -> numpy.ndarray:
        """The values as float64."""
        return numpy.frombuffer(self.data, _FLOATS[self.dtype]).astype(numpy.float64).reshape(self.shape)


def read_tensors(directory: Path, *, foreign: bool = False) -> dict[str, Stored]:
    """All tensors of the `*.safetensors` files that lie directly in `directory`; a name in two files is an error.

    Unless they are `foreign`, by other hands, they must hold the metadata without which transformers does not load.
    """
    tensors: dict[str, Stored] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found = _read_file(path, foreign=foreign)
        assert not tensors.keys() & found.keys(), f"{path} repeats names of another file"
        tensors |= found
    return tensors


def _read_file(path: Path, *, foreign: bool) -> dict[str, Stored]:
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    metadata = header.pop("__metadata__", None)
    assert foreign or metadata == {"format": "pt"}, f"{path}: transformers reads `format` from the metadata"
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = Stored(entry["dtype"], tuple(entry["shape"]), content[start + begin : start + end])
    return tensors


def assert_equal(found: dict[str, Stored], truth: dict[str, Stored]) -> None:
    """Names, dtypes, shapes and every bit."""
    assert found.keys() == truth.keys()
    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()}
    assert kinds == {name: (tensor.dtype, tensor.shape) for name, tensor in truth.items()}
    assert [name for name in found if found[name].data != truth[name].data] == []


def assert_fused(found: dict[str, Stored], truth: dict[str, Stored], base: dict[str, Stored]) -> None:
    """Names, dtypes and shapes; values within rounding, and to the bit where the adapter changed nothing.

    PEFT rounds what it adds before it adds it: the rounding is that of the sum and that of the difference to the base.
    """
    assert found.keys() == truth.keys()
    for name, tensor in found.items():
        expected = truth[name]
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape), name
        if name in base and base[name].data == expected.data:
            assert tensor.data == expected.data, name
        else:
            change = expected.values() - base[name].values() if name in base else expected.values()
            allowed = _ULPS[expected.dtype] * (abs(expected.values()) + abs(change)) + 1e-7
            assert (abs(tensor.values() - expected.values()) <= allowed).all(), name
