"""What is wrong with the pieces of tensors, gathered so that a thousand pieces of one fault make one error."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from unshard.checkpoint import Shape
from unshard.errors import IncompleteError, UnshardError
from unshard.formats.hf_shards.file_names import ShardName
from unshard.formats.hf_shards.numbering import OLDER, list_missing, list_partial
from unshard.formats.hf_shards.pieces import Piece
from unshard.formats.hf_shards.tiling import Flaw, find_flaw
from unshard.words import count_in_words, items_in_lines, items_in_words, one_line, ranges_in_words

_ALSO = "if the shards of the other ranks lie elsewhere, add their folder: --also DIR"


@dataclass(slots=True)
class Faults:
    """The faults by kind, each by the tensors that have it.

    short:       tensors that end before their shape does: how far they go, and the shape.
    holed:       where something is missing between the pieces.
    overlapping: where pieces overlap; the pieces of the first such tensor are in `overlap`.
    unlike:      pieces that cannot be of one tensor, for their types or their axes.
    """

    short: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)
    holed: dict[str, str] = field(default_factory=dict)
    overlapping: dict[str, str] = field(default_factory=dict)
    overlap: Sequence[Piece] = ()
    unlike: dict[str, str] = field(default_factory=dict)

    def add_flaw(self, name: str, flaw: Flaw, pieces: Sequence[Piece]) -> None:
        if flaw.kind == "hole":
            self.holed[name] = flaw.where
        else:
            self.overlapping[name] = flaw.where
            self.overlap = self.overlap or pieces

    def add_unlike(self, name: str, pieces: Sequence[Piece]) -> None:
        kinds: dict[str, Piece] = {}
        for piece in pieces:
            kinds.setdefault(f"{piece.dtype} of {count_in_words(len(piece.box.sizes), 'axis', 'axes')}", piece)
        self.unlike[name] = ", ".join([f"{kind} in {piece.file}" for kind, piece in kinds.items()])

    def __bool__(self) -> bool:
        return bool(self.short or self.holed or self.overlapping or self.unlike)

    def problems(self, shards: Collection[ShardName]) -> Iterator[UnshardError]:
        """One error per kind. `shards` are those that are there."""
        if self.holed:
            missing = [*list_missing(shards), *list_partial(shards)]
            why = f", for these are missing: {items_in_words(missing)}" if missing else ": pieces are missing"
            text = f"holes in {count_in_words(len(self.holed), 'tensor')}{why}\n{_lines(self.holed)}"
            yield IncompleteError(text, hint=_ALSO)
        if self.short:
            yield self._short(shards)
        if self.overlapping:
            yield self._overlapping({shard.shard for shard in shards})
        if self.unlike:
            text = f"the shards do not agree on {count_in_words(len(self.unlike), 'tensor')}:\n{_lines(self.unlike)}"
            yield IncompleteError(text, hint=OLDER)

    def _short(self, shards: Collection[ShardName]) -> UnshardError:
        found = {name: f"found {list(reach)}, expected {list(shape)}" for name, (reach, shape) in self.short.items()}
        behind = f"shards after number {max([shard.shard for shard in shards])}"
        gaps = [*list_missing(shards), *list_partial(shards)]
        missing = f"{items_in_words(gaps)}, or {behind}" if gaps else behind
        text = f"the pieces of {count_in_words(len(found), 'tensor')} end before the shape does that the model has"
        text += f", so that these must be missing: {missing}\n{_lines(found)}"
        return IncompleteError(text, hint=f"{_ALSO}. If nothing is missing, config.json is another model's")

    def _overlapping(self, numbers: Collection[int]) -> UnshardError:
        tensors = count_in_words(len(self.overlapping), "tensor")
        text = f"shards of several saves lie here: pieces of {tensors} overlap"
        whole = self._find_whole(sorted(numbers))
        if whole:
            first, rest = ranges_in_words(whole), ranges_in_words(set(numbers) - set(whole))
            text += f"; {first} fit together without {rest}"
        return IncompleteError(f"{text}\n{_lines(self.overlapping)}", hint=OLDER)

    def _find_whole(self, numbers: Sequence[int]) -> Sequence[int]:
        """The first shards, as many as fit together: those of the later save, if it had fewer ranks."""
        for count in range(len(numbers) - 1, 1, -1):
            boxes = {piece.box for piece in self.overlap if piece.rank < numbers[count - 1] and piece.extent}
            reach = tuple([max(axis) for axis in zip(*[box.stops for box in boxes], strict=True)])
            if boxes and find_flaw(reach, boxes) is None:
                return numbers[:count]
        return ()


def _lines(tensors: dict[str, str]) -> str:
    return items_in_lines([f"{one_line(name)}: {what}" for name, what in tensors.items()])
