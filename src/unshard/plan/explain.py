"""A plan in words and numbers, for people. Plain text; how it is coloured is the report's business."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from unshard.plan.moves import Compute, Copy, Literal, Move, Plan, PlannedFile, Tile, pieces_of
from unshard.target import Target, TargetFile
from unshard.words import bytes_in_words, count_in_words

_KINDS = {Literal: "literal", Copy: "copy", Tile: "tile", Compute: "compute"}
_PLURALS = {"copy": "copies"}


@dataclass(frozen=True, slots=True)
class Tally:
    """How many moves there are of a kind, and how many bytes of the output they write."""

    kind: str
    count: int
    size: int


def tally(moves: Iterable[Move]) -> tuple[Tally, ...]:
    """The moves by kind (literal, copy, tile, compute); kinds that do not occur are left out."""
    counts = dict.fromkeys(_KINDS.values(), 0)
    sizes = dict(counts)
    for move in moves:
        kind = _KINDS[type(move)]
        counts[kind] += 1
        sizes[kind] += move.size
    return tuple([Tally(kind, count, sizes[kind]) for kind, count in counts.items() if count])


def explain(plan: Plan, target: Target | None = None) -> list[str]:
    """The lines of `unshard plan`: the whole, the sources, each file; with the plan's target also each tensor."""
    moves = [move for file in plan.files for move in file.moves]
    files = count_in_words(len(plan.files), "file")
    lines = [f"{files}, {bytes_in_words(plan.size)}: {_tallies(moves)}"]
    lines += [f"reads {name} at {path}" for name, path in plan.roots.items()]
    lines += _decoding(moves)
    if plan.claims:
        lines.append(f"first checks that {count_in_words(len(plan.claims), 'pair')} of tensors hold the same bytes")
    laid_out = {file.path: file for file in target.files} if target else {}
    for file in plan.files:
        last = ", published last" if file.last else ""
        lines.append(f"{file.path}  {bytes_in_words(file.size)}{last}: {_tallies(file.moves)}")
        if file.path in laid_out:
            lines += [f"  {line}" for line in _tensor_lines(file, laid_out[file.path])]
    return lines


def _decoding(moves: Iterable[Move]) -> Iterator[str]:
    """What must be decoded before it can be gathered."""
    files = {piece.extent.file for move in moves for piece in pieces_of(move)}
    items = [file.encoded for file in files if file.encoded is not None]
    for encoding in sorted({item.encoding for item in items}):
        found = [item for item in items if item.encoding == encoding]
        packed, size = (bytes_in_words(sum(sizes)) for sizes in zip(*[(i.length, i.size) for i in found], strict=True))
        yield f"decodes {count_in_words(len(found), 'piece')} compressed with {encoding}: {packed} to {size}"


def _count(entry: Tally) -> str:
    return count_in_words(entry.count, entry.kind, _PLURALS.get(entry.kind, ""))


def _tallies(moves: Iterable[Move]) -> str:
    found = [f"{_count(entry)} ({bytes_in_words(entry.size)})" for entry in tally(moves)]
    return ", ".join(found) or "nothing to write"


def _tensor_lines(file: PlannedFile, laid_out: TargetFile) -> Iterator[str]:
    """One line per tensor: name, type, shape, and which moves write it."""
    starts = [move.destination for move in file.moves]
    stops = [move.destination + move.size for move in file.moves]
    for offset, value in sorted(laid_out.tensors, key=lambda entry: entry[0]):
        stop = offset + value.size_in_bytes
        first = bisect_left(stops, offset + 1)
        moves = file.moves[first : bisect_left(starts, stop)]
        yield f"{value.name}  {value.dtype} {list(value.shape)}  {_ways(moves, stop - offset)}"


def _ways(moves: Iterable[Move], size: int) -> str:
    """How the bytes of a tensor are written; a copy may go on into the next tensor."""
    found = [_count(entry) for entry in tally(moves)]
    functions = dict.fromkeys([move.function for move in moves if isinstance(move, Compute)])
    by = f" ({', '.join(functions)})" if functions else ""
    return f"{bytes_in_words(size)}: {', '.join(found) or 'empty'}{by}"
