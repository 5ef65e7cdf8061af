"""Where the elements of a tensor's piece lie, found by the head of its item alone wherever that is possible.

An item is a whole archive of torch.save with one tensor in it. A large checkpoint has tens of thousands of them, most
of a few shapes. Their archives differ in the elements and the checksums of these only: an item that has the length of
one that was read whole, and the same bytes before the elements, has its elements at the same place.

An item that the writer compressed is told by its head, whatever it holds, and proven when it is decoded (`encoded`).

With `SerializationFormat.SAFETENSORS` (torch 2.8, `filesystem.py`) the tensors of a file are one safetensors file
behind the objects; what is recorded as the offset of each is where that begins, and as the length that of its elements.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from unshard.dtypes import DType
from unshard.errors import FormatError
from unshard.formats.dcp.encoded import ITEM_LIMITS, LONGEST_HEAD, as_tensor, read_encoded
from unshard.formats.dcp.metadata import Place
from unshard.formats.dcp.transforms import encoding_of
from unshard.formats.safetensors_file import read_header
from unshard.formats.state_dict import read_whole
from unshard.formats.torch_file import StoredTensor, read_torch_file
from unshard.formats.torch_file.slices import FileSlice
from unshard.tensors import Box, Chunk, Extent, SourceFile, Tensor

MOST_HEADS, MOST_HEAD_SIZES = 4096, 8
"""How many heads are remembered, and of how many sizes among items of one length."""

SHARDING = "DCP_SHARDING_INFO"


@dataclass(frozen=True, slots=True)
class Stored:
    """The tensor that an item holds. `extent` is None where it has no elements."""

    dtype: DType
    shape: tuple[int, ...]
    extent: Extent | None


@dataclass(frozen=True, slots=True)
class DataFile:
    """An open file: how to read it, where it lies, and what extents call it."""

    source: FileSlice
    path: Path
    name: SourceFile


@dataclass(frozen=True, slots=True)
class Request:
    """A recorded piece of the tensor `name`, to be found at its place."""

    name: str
    box: Box
    place: Place


@dataclass(slots=True)
class PayloadFinder:
    """Finds tensors in one file after the other. Remembers heads, and the safetensors header of the last file."""

    _known: dict[tuple[int, bytes], Stored] = field(default_factory=dict)
    _head_sizes: dict[int, set[int]] = field(default_factory=dict)
    _header: _Header | None = None

    def find(self, file: DataFile, request: Request) -> Stored:
        """The tensor that a piece was written as.

        Raises FormatError where there is none to be read, TransformError where it was written in a way that is not
        undone.
        """
        place = request.place
        encoding = encoding_of(place.transforms)
        if encoding is not None:
            return _stored(read_encoded(file.source, file.name, place, encoding))
        sizes = self._head_sizes.get(place.length, ())
        head = file.source.read(place.offset, max(sizes, default=min(4, place.length)))
        for size in sizes:
            known = self._known.get((place.length, head[:size]))
            if known is not None:
                return _moved(known, file.name, place.offset)
        return self._read_archive(file, place) if head.startswith(b"PK") else self._read_safetensors(file, request)

    def _read_archive(self, file: DataFile, place: Place) -> Stored:
        root = read_torch_file(file.path, file.name, start=place.offset, length=place.length, limits=ITEM_LIMITS).root
        try:
            tensor = as_tensor(root)
        except FormatError as error:
            raise FormatError(f"{file.name}: the item at byte {place.offset:,}: {error.message}") from None
        stored = _stored(tensor)
        self._remember(file, place, tensor.storage.offset - place.offset, stored)
        return stored

    def _remember(self, file: DataFile, place: Place, head_size: int, stored: Stored) -> None:
        sizes = self._head_sizes.setdefault(place.length, set())
        if head_size <= LONGEST_HEAD and len(self._known) < MOST_HEADS and len(sizes) < MOST_HEAD_SIZES:
            sizes.add(head_size)
            head = file.source.read(place.offset, head_size)
            self._known[place.length, head] = _moved(stored, file.name, -place.offset)

    def _read_safetensors(self, file: DataFile, request: Request) -> Stored:
        name, place = request.name, request.place
        if self._header is None or self._header.file != file.name:
            self._header = _read_header(file, place.offset)
        if self._header.start != place.offset:
            places = f"{self._header.start:,} and {place.offset:,}"
            raise FormatError(f"{file.name}: two safetensors files are said to begin in it, at {places}")
        tensor = self._header.tensors.get(name)
        if tensor is None or self._header.offsets.get(name) != request.box.offsets:
            raise FormatError(f"{file.name}: no piece of it at {list(request.box.offsets)} is in the safetensors")
        if tensor.size_in_bytes != place.length:
            sizes = f"{tensor.size_in_bytes:,} bytes in the file and {place.length:,} in the metadata"
            raise FormatError(f"{file.name}: the tensor has {sizes}")
        return Stored(tensor.dtype, tensor.shape, _only_extent(tensor.chunks))


@dataclass(frozen=True, slots=True)
class _Header:
    """What the safetensors file says that begins at byte `start` of a file.

    `offsets` are those of the pieces in their tensors: of several pieces of one tensor in a file, torch keeps the last.
    """

    file: SourceFile
    start: int
    tensors: Mapping[str, Tensor]
    offsets: Mapping[str, tuple[int, ...]]


def _read_header(file: DataFile, start: int) -> _Header:
    header = read_header(file.path, file.name, start)
    try:
        sharding = json.loads(header.metadata.get(SHARDING, "{}"))
        offsets = {name: tuple(facts["saved_offsets"]) for name, facts in sharding.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"{file.name}: its {SHARDING} is damaged") from error
    return _Header(file.name, start, header.tensors, offsets)


def _stored(tensor: StoredTensor) -> Stored:
    return Stored(tensor.dtype, tensor.shape, _only_extent(read_whole(tensor, None)))


def _moved(stored: Stored, file: SourceFile, by: int) -> Stored:
    """The same tensor `by` bytes further on, in a file of that name."""
    extent = stored.extent
    return stored if extent is None else replace(stored, extent=replace(extent, file=file, offset=extent.offset + by))


def _only_extent(chunks: Sequence[Chunk]) -> Extent | None:
    return chunks[0].extent if chunks else None
