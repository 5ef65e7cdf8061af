"""Where the elements of a tensor item lie, by its head alone wherever that is possible.

An item is a whole archive of torch.save, with one tensor in it. A large checkpoint has tens of thousands of them, most
of the same few shapes. Their archives differ in the elements and their checksums only, so that a second item whose
length and whose bytes before the elements are those of one that was read whole has its elements at the same place.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from unshard.errors import FormatError
from unshard.formats.dcp.metadata import Place
from unshard.formats.torch_file import StoredTensor, UnsupportedTensor, read_torch_file
from unshard.formats.torch_file.slices import FileSlice
from unshard.tensors import SourceFile

LONGEST_HEAD = 1 << 16


class PayloadFinder:
    """Finds the tensors in items. Remembers what heads look like."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bytes], StoredTensor] = {}
        self._head_sizes: dict[int, set[int]] = {}

    def find(self, source: FileSlice, path: Path, file: SourceFile, place: Place) -> StoredTensor:
        """The tensor at a place of the open file `source`. FormatError where there is none that can be read."""
        sizes = self._head_sizes.get(place.length, ())
        head = source.read(place.offset, max(sizes)) if sizes else b""
        for size in sizes:
            known = self._known.get((place.length, head[:size]))
            if known is not None:
                storage = replace(known.storage, file=file, offset=place.offset + size)
                return replace(known, storage=storage)
        tensor = _read_whole(path, file, place)
        size = tensor.storage.offset - place.offset
        if size <= LONGEST_HEAD:
            self._head_sizes.setdefault(place.length, set()).add(size)
            self._known[place.length, source.read(place.offset, size)] = tensor
        return tensor


def _read_whole(path: Path, file: SourceFile, place: Place) -> StoredTensor:
    found = read_torch_file(path, file, start=place.offset, length=place.length).root
    if isinstance(found, StoredTensor):
        return found
    what = found.reason if isinstance(found, UnsupportedTensor) else f"is a {type(found).__name__}"
    raise FormatError(f"{file}: the item at byte {place.offset:,} {what}")
