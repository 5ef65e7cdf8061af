"""The parts of a plan's JSON, decoded strictly: exactly the fields that belong there, each of the type it must have.

All functions raise FormatError and say where in the document what was found and what was expected.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Any, TypeVar

from unshard.dtypes import BY_NAME, DType
from unshard.errors import FormatError
from unshard.plan.moves import Compute, Copy, Literal, Move, Operand, PlannedFile, Tile
from unshard.target import Claim, Seal
from unshard.tensors import ENCODINGS, Box, Chunk, Encoded, Extent, SourceFile, Tensor
from unshard.words import shorten

Decoded = TypeVar("Decoded")

_LARGEST = (1 << 63) - 1
_MOST_AXES = 64


class Decoder:
    """Turns the parts of a document into moves. `sources` are the document's source files, by number."""

    def __init__(self, sources: tuple[SourceFile, ...]) -> None:
        self.sources = sources

    def file(self, value: object) -> PlannedFile:
        values = fields(value, "a file", "path", "size", "last", "moves", "seals")
        path = text_of(values["path"], "a file's path")
        return PlannedFile(
            path,
            integer_of(values["size"], f"the size of {path}"),
            list_of(values["moves"], f"the moves of {path}", self.move),
            list_of(values["seals"], f"the seals of {path}", _seal),
            boolean_of(values["last"], f"last of {path}"),
        )

    def move(self, value: object) -> Move:
        kind = object_of(value, "a move").get("kind")
        if kind == "literal":
            return _literal(value)
        if kind == "copy":
            return self.copy(value)
        if kind == "tile":
            return self.tile(value)
        if kind == "compute":
            return self.compute(value)
        raise _unexpected(kind, "the kind of a move", "literal, copy, tile or compute")

    def copy(self, value: object) -> Copy:
        values = fields(value, "a copy", "kind", "to", "size", "source", "from")
        return Copy(
            integer_of(values["to"], "to of a copy"),
            integer_of(values["size"], "size of a copy"),
            self.source(values["source"]),
            integer_of(values["from"], "from of a copy"),
        )

    def tile(self, value: object) -> Tile:
        values = fields(value, "a tile", "kind", "to", "name", "dtype", "shape", "pieces")
        name = text_of(values["name"], "the name of a tile")
        return Tile(
            integer_of(values["to"], f"to of {name}"),
            dtype_of(values["dtype"], name),
            shape_of(values["shape"], f"the shape of {name}"),
            list_of(values["pieces"], f"the pieces of {name}", self.piece),
            name,
        )

    def compute(self, value: object) -> Compute:
        names = ("kind", "to", "name", "dtype", "shape", "function", "parameters", "operands")
        values = fields(value, "a compute", *names)
        name = text_of(values["name"], "the name of a compute")
        return Compute(
            integer_of(values["to"], f"to of {name}"),
            dtype_of(values["dtype"], name),
            shape_of(values["shape"], f"the shape of {name}"),
            text_of(values["function"], f"the function of {name}"),
            object_of(values["parameters"], f"the parameters of {name}"),
            list_of(values["operands"], f"the operands of {name}", self.operand),
            name,
        )

    def operand(self, value: object) -> Operand:
        values = fields(value, "an operand", "dtype", "shape", "grid", "banded", "pieces")
        return Operand(
            dtype_of(values["dtype"], "an operand"),
            shape_of(values["shape"], "the shape of an operand"),
            shape_of(values["grid"], "the grid of an operand"),
            list_of(values["pieces"], "the pieces of an operand", self.piece),
            None if values["banded"] is None else integer_of(values["banded"], "banded of an operand"),
        )

    def piece(self, value: object) -> Chunk:
        names = ("offsets", "sizes", "source", "from", "strides", "dtype", "encoding", "rank")
        values = fields(value, "a piece", *names)
        offsets, sizes = shape_of(values["offsets"], "offsets"), shape_of(values["sizes"], "sizes")
        if len(offsets) != len(sizes):
            raise _unexpected(values["offsets"], "the offsets of a piece", f"{len(sizes)} of them")
        extent = Extent(
            self.source(values["source"]),
            integer_of(values["from"], "from of a piece"),
            shape_of(values["strides"], "the strides of a piece"),
            dtype_of(values["dtype"], "a piece"),
        )
        if values["encoding"] != extent.encoding:
            raise _unexpected(values["encoding"], "the encoding of a piece", f"{extent.encoding}, as its source is")
        rank = None if values["rank"] is None else integer_of(values["rank"], "the rank of a piece")
        return Chunk(Box(offsets, sizes), extent, rank)

    def source(self, value: object) -> SourceFile:
        number = integer_of(value, "the number of a source")
        if number >= len(self.sources):
            raise _unexpected(value, "the number of a source", f"less than {len(self.sources)}")
        return self.sources[number]

    def claim(self, value: object) -> Claim:
        values = fields(value, "a claim", "left", "right", "message", "hint")
        return Claim(
            self.tensor(values["left"]),
            self.tensor(values["right"]),
            text_of(values["message"], "the message of a claim"),
            None if values["hint"] is None else text_of(values["hint"], "the hint of a claim"),
        )

    def tensor(self, value: object) -> Tensor:
        values = fields(value, "a tensor", "name", "dtype", "shape", "factors", "pieces")
        name = text_of(values["name"], "the name of a tensor")
        shape = shape_of(values["shape"], f"the shape of {name}")
        factors = list_of(values["factors"], f"the factors of {name}", lambda group: shape_of(group, "factors"))
        if len(factors) != len(shape):
            raise _unexpected(values["factors"], f"the factors of {name}", f"{len(shape)} of them")
        pieces = list_of(values["pieces"], f"the pieces of {name}", self.piece)
        return Tensor(name, dtype_of(values["dtype"], name), shape, pieces, factors)


def _literal(value: object) -> Literal:
    values = fields(value, "a literal", "kind", "to", "base64")
    text = text_of(values["base64"], "base64 of a literal")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _unexpected(text[:40], "base64 of a literal", "base64") from None
    return Literal(integer_of(values["to"], "to of a literal"), data)


def _seal(value: object) -> Seal:
    numbers = list_of(value, "a seal", lambda number: integer_of(number, "a seal"))
    if len(numbers) != 3:
        raise _unexpected(value, "a seal", "three numbers")
    return Seal(*numbers)


def decode_source(value: object) -> SourceFile:
    if not isinstance(value, list) or len(value) not in (2, 3):
        raise _unexpected(value, "a source", "a root and a path, and how the file is encoded")
    root, path = [text_of(name, "a source") for name in value[:2]]
    return SourceFile(root, path, _encoded(value[2], path) if len(value) == 3 else None)


def _encoded(value: object, path: str) -> Encoded:
    values = fields(value, f"the encoding of {path}", "encoding", "start", "length", "size", "holds")
    encoding = text_of(values["encoding"], f"the encoding of {path}")
    if encoding not in ENCODINGS:
        raise _unexpected(encoding, f"the encoding of {path}", " or ".join(ENCODINGS))
    start, length, size = [integer_of(values[name], f"{name} of {path}") for name in ("start", "length", "size")]
    holds = None if values["holds"] is None else text_of(values["holds"], f"holds of {path}")
    return Encoded(encoding, start, length, size, holds)


def fields(value: object, where: str, *names: str) -> dict[str, Any]:
    """The object's values; it must have these names and no others."""
    values = object_of(value, where)
    if set(values) != set(names):
        raise _unexpected(sorted(values), f"the fields of {where}", ", ".join(names))
    return values


def object_of(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise _unexpected(value, where, "an object")
    return value


def list_of(value: object, where: str, decode: Callable[[object], Decoded]) -> tuple[Decoded, ...]:
    if not isinstance(value, list):
        raise _unexpected(value, where, "a list")
    return tuple([decode(item) for item in value])


def shape_of(value: object, where: str) -> tuple[int, ...]:
    sizes = list_of(value, where, lambda size: integer_of(size, where))
    if len(sizes) > _MOST_AXES:
        raise _unexpected(value, where, f"at most {_MOST_AXES} axes")
    return sizes


def text_of(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise _unexpected(value, where, "a string")
    return value


def integer_of(value: object, where: str) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise _unexpected(value, where, "an integer from 0 to 2^63 - 1")
    return value


def boolean_of(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise _unexpected(value, where, "true or false")
    return value


def dtype_of(value: object, where: str) -> DType:
    dtype = BY_NAME.get(text_of(value, f"the dtype of {where}"))
    if dtype is None:
        raise _unexpected(value, f"the dtype of {where}", "a dtype of safetensors")
    return dtype


def _unexpected(value: object, where: str, expected: str) -> FormatError:
    return FormatError(f"in the plan, {where} is {shorten(repr(value), 80)}, not {expected}")
