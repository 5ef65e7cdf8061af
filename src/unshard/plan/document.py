"""A plan as JSON: to look at, to keep, to run on another machine. What is loaded is not trusted but proven anew."""

from __future__ import annotations

import base64
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unshard.errors import FormatError
from unshard.plan.decoder import Decoder, decode_source, fields, list_of, object_of, text_of
from unshard.plan.moves import Copy, Literal, Move, Plan, PlannedFile, Tile
from unshard.plan.proof import plan_faults
from unshard.tensors import Chunk, SourceFile, Tensor
from unshard.words import items_in_lines

FORMAT = "unshard-plan"

VERSION = 1
"""Grows when an old reader would misread a new document."""


# -- to JSON -----------------------------------------------------------------------------------------------------------


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as what `json.dumps` takes; the format is told in docs/reference/plan.md."""
    sources = _Sources()
    files = [_file_to_json(file, sources) for file in plan.files]
    claims = [
        {
            "left": _tensor_to_json(claim.left, sources),
            "right": _tensor_to_json(claim.right, sources),
            "message": claim.message,
            "hint": claim.hint,
        }
        for claim in plan.claims
    ]
    return {
        "format": FORMAT,
        "version": VERSION,
        "roots": {name: str(path) for name, path in plan.roots.items()},
        "sources": [_source_to_json(file) for file in sources.numbers],
        "files": files,
        "claims": claims,
    }


def _source_to_json(file: SourceFile) -> list[Any]:
    return [file.root, file.path] if file.encoded is None else [file.root, file.path, asdict(file.encoded)]


class _Sources:
    """The source files of a document, by number."""

    def __init__(self) -> None:
        self.numbers: dict[SourceFile, int] = {}

    def number(self, file: SourceFile) -> int:
        return self.numbers.setdefault(file, len(self.numbers))


def _file_to_json(file: PlannedFile, sources: _Sources) -> dict[str, Any]:
    return {
        "path": file.path,
        "size": file.size,
        "last": file.last,
        "moves": [_move_to_json(move, sources) for move in file.moves],
        "seals": [[seal.at, seal.start, seal.stop] for seal in file.seals],
    }


def _move_to_json(move: Move, sources: _Sources) -> dict[str, Any]:
    if isinstance(move, Literal):
        return {"kind": "literal", "to": move.destination, "base64": base64.b64encode(move.data).decode()}
    if isinstance(move, Copy):
        return {
            "kind": "copy",
            "to": move.destination,
            "size": move.size,
            "source": sources.number(move.file),
            "from": move.offset,
        }
    common = {"to": move.destination, "name": move.name, "dtype": move.dtype.name, "shape": list(move.shape)}
    if isinstance(move, Tile):
        return {"kind": "tile", **common, "pieces": _pieces_to_json(move.pieces, sources)}
    operands = [
        {
            "dtype": operand.dtype.name,
            "shape": list(operand.shape),
            "grid": list(operand.grid),
            "banded": operand.banded,
            "pieces": _pieces_to_json(operand.pieces, sources),
        }
        for operand in move.operands
    ]
    return {
        "kind": "compute",
        **common,
        "function": move.function,
        "parameters": dict(move.parameters),
        "operands": operands,
    }


def _pieces_to_json(pieces: tuple[Chunk, ...], sources: _Sources) -> list[dict[str, Any]]:
    return [
        {
            "offsets": list(piece.box.offsets),
            "sizes": list(piece.box.sizes),
            "source": sources.number(piece.extent.file),
            "from": piece.extent.offset,
            "strides": list(piece.extent.strides),
            "dtype": piece.extent.dtype.name,
            "encoding": piece.extent.encoding,
            "rank": piece.rank,
        }
        for piece in pieces
    ]


def _tensor_to_json(tensor: Tensor, sources: _Sources) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype.name,
        "shape": list(tensor.shape),
        "factors": [list(group) for group in tensor.factors],
        "pieces": _pieces_to_json(tensor.chunks, sources),
    }


# -- from JSON ---------------------------------------------------------------------------------------------------------


def from_json(document: object) -> Plan:
    """The plan of a document, proven as `plan.proof` says.

    Raises FormatError for a document that is no plan, of another version, or whose plan is not sound.
    """
    values = fields(document, "the plan", "format", "version", "roots", "sources", "files", "claims")
    if values["format"] != FORMAT or values["version"] != VERSION:
        raise FormatError(
            f"this is no plan of version {VERSION}: format {values['format']!r}, version {values['version']!r}",
            hint="make the plan again with this version of unshard: unshard plan SRC OUT --json",
        )
    roots = {name: Path(text_of(path, "a root")) for name, path in object_of(values["roots"], "roots").items()}
    decoder = Decoder(list_of(values["sources"], "sources", decode_source))
    files = list_of(values["files"], "files", decoder.file)
    claims = list_of(values["claims"], "claims", decoder.claim)
    plan = Plan(roots, files, claims)
    faults = plan_faults(plan)
    if faults:
        raise FormatError(f"the plan is not sound:\n{items_in_lines(faults)}")
    return plan
