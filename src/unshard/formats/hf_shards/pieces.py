"""The pieces in the files: header by header, no payload is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from unshard.dtypes import DType
from unshard.errors import FormatError, UnshardError
from unshard.formats.dcp.directory import Folder
from unshard.formats.hf_shards.file_names import ShardName, parse_shard
from unshard.formats.hf_shards.sharding_info import SHARDING_INFO, parse_sharding_info
from unshard.formats.safetensors_file import SafetensorsFile, read_header
from unshard.tensors import Box, Extent, SourceFile, Tensor
from unshard.words import names_in_words, shorten

_COPY = "copy the file again, or take an earlier checkpoint"


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A file of a shard, and what extents call it."""

    name: ShardName
    path: Path
    file: SourceFile


@dataclass(frozen=True, slots=True)
class Piece:
    """What a rank holds of a tensor. `extent` is None where that is nothing: a box without elements."""

    rank: int
    box: Box
    dtype: DType
    extent: Extent | None
    file: SourceFile


def list_shards(folders: Sequence[Folder]) -> list[ShardFile]:
    """The shards in all folders, in order of their numbers; a file that lies in several is taken from the first."""
    found: dict[ShardName, ShardFile] = {}
    for folder in folders:
        for path in sorted(folder.path.iterdir()):
            name = parse_shard(path.name)
            if name is not None:
                found.setdefault(name, ShardFile(name, path, folder.file(path.name)))
    return [found[name] for name in sorted(found)]


def read_pieces(shards: Iterable[ShardFile], problems: list[UnshardError]) -> dict[str, list[Piece]]:
    """Tensor name → its pieces. Each file that cannot be read is a problem."""
    pieces: dict[str, list[Piece]] = {}
    for shard in shards:
        try:
            found = _read_shard(shard)
        except FormatError as error:
            problems.append(error)
            continue
        for name, piece in found:
            pieces.setdefault(name, []).append(piece)
    return pieces


def _read_shard(shard: ShardFile) -> list[tuple[str, Piece]]:
    header = read_header(shard.path, shard.file)
    offsets = _read_offsets(shard.path, header)
    return [(name, _piece(shard, tensor, offsets[name])) for name, tensor in header.tensors.items()]


def _piece(shard: ShardFile, tensor: Tensor, offsets: tuple[int, ...]) -> Piece:
    if len(offsets) != tensor.ndim:
        name = names_in_words([shorten(tensor.name, 200)])
        text = f"{shard.path}: {name} of shape {list(tensor.shape)} begins at {list(offsets)}"
        raise FormatError(f"{text}: not as many offsets as axes", hint=_COPY)
    extent = tensor.chunks[0].extent if tensor.chunks else None
    return Piece(shard.name.rank, Box(offsets, tensor.shape), tensor.dtype, extent, shard.file)


def _read_offsets(path: Path, header: SafetensorsFile) -> dict[str, tuple[int, ...]]:
    """Where the pieces of a file begin. Raises FormatError unless it tells that of all its tensors, and of no other."""
    text = header.metadata.get(SHARDING_INFO)
    if text is None:
        message = f"{path}: the metadata have no {SHARDING_INFO}, without which a piece has no place"
        raise FormatError(message, hint=f"torch's HuggingFaceStorageWriter did not write it, or not last: {_COPY}")
    try:
        offsets = parse_sharding_info(text)
    except ValueError as error:
        raise FormatError(f"{path}: {SHARDING_INFO} is malformed: {error}", hint=_COPY) from None
    if unplaced := [name for name in header.tensors if name not in offsets]:
        text = f"{path}: {SHARDING_INFO} has no place for {len(unplaced)} tensors of the file"
        raise FormatError(f"{text}: {names_in_words(unplaced)}", hint=_COPY)
    if absent := [name for name in offsets if name not in header.tensors]:
        text = f"{path}: {SHARDING_INFO} tells of {len(absent)} tensors that the file does not hold"
        raise FormatError(f"{text}: {names_in_words(absent)}", hint=_COPY)
    return offsets
