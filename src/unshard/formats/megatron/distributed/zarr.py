"""The `zarr` backend of megatron-core before 0.13: one directory per tensor, one file per chunk.

Facts: NVIDIA/Megatron-LM `megatron/core/dist_checkpointing/strategies/zarr.py` (arrays are created with the ranks'
shards as chunks, uncompressed, empty chunks written, and `bfloat16` put in the place of `<V2`); the Zarr v2
specification for the files: `.zarray`, chunks named by their place in the grid, those at the edges stored full-size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, product
from math import prod
from pathlib import Path
from typing import Any

from unshard.dtypes import BF16, BOOL, C64, F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64, DType
from unshard.errors import FormatError, IncompleteError
from unshard.formats.huggingface.assets import list_directory, read_config
from unshard.formats.megatron.distributed.file_names import ARRAY
from unshard.formats.megatron.distributed.stored import Stored
from unshard.tensors import Box, Chunk, Extent, SourceFile, Tensor, row_major_strides
from unshard.words import items_in_words

_MAX_CHUNKS = 1 << 18
_LISTED = 16
_DTYPES: dict[str, DType] = {
    "bfloat16": BF16, "<V2": BF16, "|b1": BOOL, "|u1": U8, "|i1": I8, "<i2": I16, "<i4": I32, "<i8": I64, "<u2": U16,
    "<u4": U32, "<u8": U64, "<f2": F16, "<f4": F32, "<f8": F64, "<c8": C64,
}  # fmt: skip
"""numpy's names. Two bytes of no type (`V2`) are what numpy makes of bfloat16."""
_WRITTEN: Mapping[str, tuple[Any, ...]] = {
    "zarr_format": (2,),
    "compressor": (None,),
    "filters": (None, []),
    "order": ("C",),
    "dimension_separator": (".", None),
}
"""What Megatron writes; chunks of all others would have to be decoded."""


@dataclass(frozen=True, slots=True)
class _Array:
    """What `.zarray` says: all chunks are of the size `chunk`, also those that reach over the edge."""

    dtype: DType
    shape: tuple[int, ...]
    chunk: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of chunks along each axis."""
        return tuple([-(-size // each) for size, each in zip(self.shape, self.chunk, strict=True)])

    def indices(self) -> Iterator[tuple[int, ...]]:
        """The places of all chunks in the grid."""
        return product(*[range(count) for count in self.grid])

    def box(self, index: tuple[int, ...]) -> Box:
        """The elements of the chunk at a place of the grid, without those beyond the edge."""
        offsets = tuple([number * each for number, each in zip(index, self.chunk, strict=True)])
        room = zip(self.chunk, self.shape, offsets, strict=True)
        return Box(offsets, tuple([min(each, size - start) for each, size, start in room]))


def read_zarr(directory: Path, root: str, wanted: Callable[[str], bool]) -> Stored:
    """The tensors in the subdirectories of `directory`, which is the root `root` of their files.

    `wanted` says of a key whether its tensor is to be read. All that is wrong is in the result's problems.
    """
    found = Stored()
    for place in list_directory(directory):
        if (place / ARRAY).is_file():
            if not wanted(place.name):
                found.left_out.append(place.name)
                continue
            try:
                found.tensors[place.name] = _read_chunks(place, root, _read_array(place / ARRAY))
            except (FormatError, IncompleteError) as error:
                found.problems.append(error)
        elif place.is_dir():
            found.left_out += [f"{place.name}/{file.name}" for file in place.glob("shard_*.pt")]
    return found


def _read_array(path: Path) -> _Array:
    facts = read_config(path)
    for member, written in _WRITTEN.items():
        value = facts.get(member)
        if value not in written:
            raise FormatError(f"{path}: {member} is {value!r}; Megatron writes {written[0]!r}, and only that is read")
    dtype = _DTYPES.get(facts["dtype"]) if isinstance(facts.get("dtype"), str) else None
    if dtype is None:
        raise FormatError(f"{path}: elements of type {facts.get('dtype')!r}, which safetensors cannot hold")
    shape, chunk = _counts(facts.get("shape"), 0), _counts(facts.get("chunks"), 1)
    if shape is None or chunk is None or len(shape) != len(chunk):
        raise FormatError(f"{path}: a shape of {facts.get('shape')!r} in chunks of {facts.get('chunks')!r}")
    array = _Array(dtype, shape, chunk)
    if prod([max(count, 1) for count in array.grid]) > _MAX_CHUNKS:
        raise FormatError(f"{path}: a grid of {list(array.grid)} chunks; at most {_MAX_CHUNKS:,} are read")
    return array


def _counts(value: Any, least: int) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(size) is int and least <= size < 1 << 63 for size in value):
        return tuple(value)
    return None


def _read_chunks(place: Path, root: str, array: _Array) -> Tensor:
    """The tensor of one array. FormatError for a chunk of another size, IncompleteError for those that are missing."""
    sizes = {file.name: file.stat().st_size for file in list_directory(place) if file.name != ARRAY and file.is_file()}
    _check_grid(place, array, sizes)
    expected = prod(array.chunk) * array.dtype.itemsize
    strides = row_major_strides(array.chunk, array.dtype.itemsize)
    chunks: list[Chunk] = []
    for index in array.indices():
        name = _chunk_name(index)
        if sizes[name] != expected:
            raise FormatError(
                f"{place / name}: has {sizes[name]:,} bytes, but a chunk of {list(array.chunk)} {array.dtype} has "
                f"{expected:,}",
                hint="the file was truncated, or is still being written: copy it again, then rerun",
            )
        extent = Extent(SourceFile(root, f"{place.name}/{name}"), 0, strides, array.dtype)
        chunks.append(Chunk(array.box(index), extent))
    return Tensor(place.name, array.dtype, array.shape, tuple(chunks))


def _check_grid(place: Path, array: _Array, sizes: Mapping[str, int]) -> None:
    """Raise IncompleteError where chunks are missing. A grid is looked into no further than there are files."""
    names = map(_chunk_name, islice(array.indices(), len(sizes) + _LISTED))
    missing = [name for name in names if name not in sizes]
    if missing:
        count = prod(array.grid)
        raise IncompleteError(
            f"{place}: {max(len(missing), count - len(sizes)):,} of {count:,} chunks are missing: "
            f"{items_in_words(missing)}",
            hint="copy the directory again, or take an earlier checkpoint",
        )


def _chunk_name(index: tuple[int, ...]) -> str:
    return ".".join([str(number) for number in index]) or "0"
