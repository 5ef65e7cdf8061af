"""From recorded pieces to chunks: each item is found in its file and compared with what is recorded of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from unshard.checkpoint import Note
from unshard.dtypes import DType
from unshard.errors import FormatError
from unshard.formats.dcp.directory import Directory
from unshard.formats.dcp.faults import Faults
from unshard.formats.dcp.file_names import rank_of
from unshard.formats.dcp.metadata import Metadata, Piece, TensorEntry
from unshard.formats.dcp.payloads import DataFile, PayloadFinder, Request, Stored
from unshard.formats.dcp.transforms import TransformError
from unshard.formats.dcp.uneven import Written, settle
from unshard.formats.torch_file.slices import open_slice
from unshard.tensors import Box, Chunk, Tensor

Found: TypeAlias = tuple[Box, int | None, Stored]
"""The box of a piece, the rank that wrote it, and what its item holds."""

_SETTLED = (
    "where FSDP2 lies above tensor parallelism, torch recorded wrong places for pieces of uneven length; the true ones "
    "follow from the sizes that are stored"
)


@dataclass(slots=True)
class TensorReader:
    """Reads the tensors of a directory. What is wrong with them is in `faults`, what was mended in `notes`."""

    directory: Directory
    metadata: Metadata
    faults: Faults = field(default_factory=Faults)
    notes: list[Note] = field(default_factory=list)
    _finder: PayloadFinder = field(default_factory=PayloadFinder)

    def read(self) -> dict[str, Tensor]:
        """The tensors of the metadata that can be told: chunks that cannot be are left out of them."""
        entries = {name: entry for name, entry in self.metadata.tensors.items() if self._is_held(name, entry)}
        found = self._find(entries, _has_elements)
        doubtful = {name: entries[name] for name, pieces in found.items() if not all(map(_fits, pieces))}
        if doubtful:
            for name, pieces in self._find(doubtful, lambda piece: not _has_elements(piece)).items():
                found[name] += pieces
            self._settle(doubtful, found)
        return {
            name: Tensor(name, entry.dtype, entry.shape, _chunks(found[name]))
            for name, entry in entries.items()
            if isinstance(entry.dtype, DType)
        }

    def _is_held(self, name: str, entry: TensorEntry) -> bool:
        if isinstance(entry.dtype, DType):
            return True
        self.faults.unheld.setdefault(entry.dtype, []).append(name)
        return False

    def _find(self, entries: Mapping[str, TensorEntry], which: Callable[[Piece], bool]) -> dict[str, list[Found]]:
        """What the items of those pieces hold, file by file and in the order of the file."""
        by_file: dict[str, list[Request]] = {}
        for name, entry in entries.items():
            for piece in filter(which, entry.pieces):
                if piece.place is None:
                    self.faults.unplaced[name] = self.faults.unplaced.get(name, 0) + 1
                else:
                    by_file.setdefault(piece.place.path, []).append(Request(name, piece.box, piece.place))
        found: dict[str, list[Found]] = {name: [] for name in entries}
        for file_name, requests in sorted(by_file.items()):
            requests.sort(key=lambda request: request.place.offset)
            rank = rank_of(file_name)
            try:
                for request, stored in self._find_in(file_name, requests):
                    found[request.name].append((request.box, rank, stored))
            except FormatError as error:
                self.faults.damaged.append(error)
        return found

    def _find_in(self, file_name: str, requests: Sequence[Request]) -> Iterator[tuple[Request, Stored]]:
        """What is found in one file. Raises FormatError where the file as a whole cannot be read."""
        place = self.directory.find(file_name)
        if place is None:
            self.faults.missing[file_name] = {request.name for request in requests}
            return
        path, name = place
        try:
            with open_slice(path) as source:
                file = DataFile(source, path, name)
                for request in requests:
                    if request.place.offset + request.place.length > source.size:
                        self.faults.short.setdefault((name, source.size), set()).add(request.name)
                    elif (stored := self._find_one(file, request)) is not None:
                        yield request, stored
        except FormatError as error:
            raise FormatError(f"{name}: {error.message}", hint=error.hint) from error.__cause__

    def _find_one(self, file: DataFile, request: Request) -> Stored | None:
        try:
            stored = self._finder.find(file, request)
        except TransformError as error:
            self.faults.transformed.setdefault((error.message, error.hint), []).append(request.name)
            return None
        except FormatError as error:
            self.faults.damaged.append(FormatError(f"`{request.name}`: {error.message}", hint=error.hint))
            return None
        recorded = self.metadata.tensors[request.name].dtype
        if stored.dtype is not recorded:
            types = f"{recorded} where {stored.dtype} is stored"
            self.faults.retyped.setdefault(types, {})[request.name] = file.name
            return None
        return stored

    def _settle(self, entries: Mapping[str, TensorEntry], found: dict[str, list[Found]]) -> None:
        """Give pieces of other shapes than recorded their true boxes, or leave them out and say so."""
        world = max([rank + 1 for file in self.metadata.files if (rank := rank_of(file)) is not None], default=0)
        settled = []
        for name, entry in entries.items():
            pieces = found[name]
            written = [Written(rank, box, stored.shape) for box, rank, stored in pieces if rank is not None]
            boxes = settle(entry.shape, written, world) if len(written) == len(pieces) else None
            if boxes is not None:
                found[name] = [(box, *piece[1:]) for box, piece in zip(boxes, pieces, strict=True)]
                settled.append(name)
                continue
            box, _, stored = next(piece for piece in pieces if not _fits(piece))
            what = f"recorded {box}, of shape {list(box.sizes)}; stored {list(stored.shape)}"
            self.faults.reshaped[name] = f"{what} in {stored.extent.file}" if stored.extent else what
            found[name] = [piece for piece in pieces if _fits(piece)]
        if settled:
            self.notes.append(Note(_SETTLED, tuple(settled)))


def _has_elements(piece: Piece) -> bool:
    return 0 not in piece.box.sizes


def _fits(piece: Found) -> bool:
    box, _, stored = piece
    return stored.shape == box.sizes


def _chunks(pieces: Iterable[Found]) -> tuple[Chunk, ...]:
    return tuple([Chunk(box, stored.extent, rank) for box, rank, stored in pieces if stored.extent is not None])
