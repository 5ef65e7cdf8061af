"""From pieces to whole tensors, with the proof that none is missing, which the files alone cannot give.

Where a tensor ends is not stored. The pieces that are there reach somewhere, and if the last one is missing they reach
less far, without a hole. So the shape comes from elsewhere if it can: then pieces that end before it are an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from unshard.checkpoint import Note, Shape
from unshard.formats.dcp.uneven import Written, settle
from unshard.formats.hf_shards.faults import Faults
from unshard.formats.hf_shards.pieces import Piece
from unshard.formats.hf_shards.tiling import Flaw, find_flaw
from unshard.tensors import Box, Chunk, Tensor

_SETTLED = (
    "where FSDP2 lies above tensor parallelism, torch recorded wrong places for pieces of uneven length; the true ones "
    "follow from the sizes that are stored"
)


@dataclass(slots=True)
class Assembler:
    """Makes tensors of pieces.

    shapes:   tensor name → its whole shape, as far as anything tells it.
    world:    the number of ranks that wrote.
    faults:   what is wrong with the tensors so far.
    unproven: tensors whose last piece nobody could know to be missing; `settled`: those whose pieces were moved.
    """

    shapes: Mapping[str, Shape]
    world: int
    faults: Faults = field(default_factory=Faults)
    unproven: list[str] = field(default_factory=list)
    settled: list[str] = field(default_factory=list)

    def assemble(self, name: str, pieces: Sequence[Piece]) -> Tensor | None:
        """The tensor of these pieces; None where they are of different tensors."""
        axes = {len(piece.box.sizes) for piece in pieces}
        dtypes = list(dict.fromkeys(piece.dtype for piece in pieces if piece.extent is not None))
        if len(axes) > 1 or len(dtypes) > 1:
            self.faults.add_unlike(name, pieces)
            return None
        shape, pieces = self._place(name, pieces)
        chunks = [Chunk(piece.box, piece.extent, piece.rank) for piece in pieces if piece.extent is not None]
        return Tensor(name, (dtypes or [pieces[0].dtype])[0], shape, tuple(chunks))

    def notes(self) -> Iterator[Note]:
        if self.settled:
            yield Note(_SETTLED, tuple(self.settled))

    def _place(self, name: str, pieces: Sequence[Piece]) -> tuple[Shape, Sequence[Piece]]:
        """The shape of a tensor, and its pieces where they belong."""
        reach, wanted = _reach(pieces), self.shapes.get(name)
        if wanted is not None and len(wanted) != len(reach):
            wanted = None  # another tensor of the same name; naming the model tells what it should be
        flaw = _flaw(reach if wanted is None else wanted, pieces)
        if flaw is None:
            if wanted is None and reach:
                self.unproven.append(name)
            return wanted or reach, pieces
        found = self._settle(pieces, [wanted] if wanted is not None else _sums(reach, pieces))
        if found is not None:
            self.settled.append(name)
            if wanted is None:
                self.unproven.append(name)
            return found
        whole = _flaw(reach, pieces)
        if whole is not None:
            self.faults.add_flaw(name, whole, pieces)
        elif wanted is not None and all(there <= size for there, size in zip(reach, wanted, strict=True)):
            self.faults.short[name] = reach, wanted
        else:
            self.unproven.append(name)  # larger than it should be: naming the model tells
        return reach, pieces

    def _settle(self, pieces: Sequence[Piece], shapes: Sequence[Shape]) -> tuple[Shape, Sequence[Piece]] | None:
        """The only shape of these that some mesh explains, and the pieces where it puts them."""
        written = [Written(piece.rank, piece.box, piece.box.sizes) for piece in pieces]
        found: list[tuple[Shape, Sequence[Piece]]] = []
        for shape in shapes:
            boxes = settle(shape, written, self.world, sizes_recorded=False)
            if boxes is not None:
                placed = [replace(piece, box=box) for piece, box in zip(pieces, boxes, strict=True)]
                if _flaw(shape, placed) is None:
                    found.append((shape, placed))
        return found[0] if len(found) == 1 else None


def _reach(pieces: Sequence[Piece]) -> Shape:
    """How far the pieces go. Those without elements count: torch puts them at the end of their tensor."""
    stops = [piece.box.stops for piece in pieces]
    return tuple([max(axis) for axis in zip(*stops, strict=True)])


def _sums(reach: Shape, pieces: Sequence[Piece]) -> list[Shape]:
    """The shapes that a tensor has if its pieces lie one behind the other, along one axis or another."""
    boxes = _boxes(pieces)
    sums = [sum([box.sizes[axis] for box in boxes]) for axis in range(len(reach))]
    return [(*reach[:axis], total, *reach[axis + 1 :]) for axis, total in enumerate(sums)]


def _flaw(shape: Shape, pieces: Sequence[Piece]) -> Flaw | None:
    return find_flaw(shape, _boxes(pieces))


def _boxes(pieces: Sequence[Piece]) -> list[Box]:
    """The boxes that hold elements, replicas once."""
    return list(dict.fromkeys([piece.box for piece in pieces if piece.extent is not None]))
