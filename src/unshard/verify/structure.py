"""Structure: which files there are, and what their headers say, read again from the disk."""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from unshard.errors import UnshardError, VerificationError, raise_all
from unshard.formats.contract import Source
from unshard.formats.huggingface.index import read_index
from unshard.formats.huggingface.reader import HuggingFace
from unshard.formats.huggingface.weights import find_weights
from unshard.run.occupants import survey
from unshard.target import Target, TargetFile
from unshard.tensors import SourceFile, Tensor

OUTPUT_ROOT = "output"
"""The root name of the output directory in what is found there."""


def check_files(target: Target, output: Path) -> list[UnshardError]:
    """The planned files lie in the output, each of its planned size, with its known bytes; JSON parses.

    Beside them lies nothing that a loader could take for a part of the model; what else a person keeps there may stay.
    """
    problems: list[UnshardError] = []
    expected = {file.path: file for file in target.files}
    found = {path.relative_to(output).as_posix(): path for path in output.rglob("*") if not path.is_dir()}
    occupants = survey(output, list(expected))
    missing = sorted(expected.keys() - found.keys())
    surplus = sorted({*occupants.model, *occupants.garbage} - expected.keys())
    problems += [VerificationError(f"`{output / name}` was planned, but is not there") for name in missing]
    problems += [VerificationError(f"`{output / name}` lies there, but was not planned") for name in surplus]
    for name, file in expected.items():
        path = found.get(name)
        if path is None:
            continue
        size = path.stat().st_size
        if size != file.size:
            problems.append(VerificationError(f"`{path}` has {size} bytes, but {file.size} were planned"))
            continue
        problems += _check_literals(file, path)
        if name.endswith(".json") and file.literals:  # a side file is its source's bytes, well-formed or not
            problems += _check_json(path)
        if name.endswith(".safetensors"):
            problems += ask_safetensors(path)
    return problems


def read_weights(target: Target, output: Path) -> Mapping[str, Mapping[str, Tensor]]:
    """Directory (relative to the output) → the tensors that its weights files hold, by their own headers and index.

    Raises VerificationError where a directory does not hold exactly the planned names.
    """
    tensors: dict[str, Mapping[str, Tensor]] = {}
    problems: list[VerificationError] = []
    for directory, values in target.weights_by_directory.items():
        names = [value.name for value in values]
        catalog = HuggingFace().read_output(Source(output / directory))
        problems += [VerificationError(problem.message, hint=problem.hint) for problem in catalog.problems]
        missing = [name for name in names if name not in catalog.tensors]
        surplus = sorted(set(catalog.tensors) - set(names))
        problems += [VerificationError(f"`{name}` was planned, but no weights file holds it") for name in missing]
        problems += [VerificationError(f"`{name}` is in a weights file, but was not planned") for name in surplus]
        tensors[directory] = {
            name: move_under(tensor, OUTPUT_ROOT, directory) for name, tensor in catalog.tensors.items()
        }
    raise_all(problems)
    return tensors


def check_weights_file(path: Path) -> list[UnshardError]:
    """What a file says of itself, asked again: a safetensors header of the library, an archive of its checksums."""
    if path.name.endswith(".safetensors"):
        return ask_safetensors(path)
    return _check_archive(path) if zipfile.is_zipfile(path) else []


def ask_safetensors(path: Path) -> list[UnshardError]:
    """The safetensors library's own opinion of a file's header."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            file.keys()
    except (SafetensorError, OSError) as error:
        return [VerificationError(f"`{path}`: the safetensors library refuses it: {error}")]
    return []


def _check_archive(path: Path) -> list[UnshardError]:
    """The CRC-32 of every member of a .bin file, read in small pieces."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except _ARCHIVE_ERRORS as error:
        return [VerificationError(f"`{path}`: the archive cannot be read: {error}")]
    if damaged is None:
        return []
    return [VerificationError(f"`{path}`: the checksum of `{damaged}` in it does not hold", hint=_DAMAGED)]


_ARCHIVE_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    LookupError,
    struct.error,
)
"""What Python's reader raises for damaged archives. Where a flag says encrypted, it asks for a password."""

_DAMAGED = "the file was damaged after it was written: copy or merge it again"


def check_index(directory: Path, size: int) -> list[UnshardError]:
    """Whether the index of a model, if it has one, tells of as many bytes of tensors as there are (`size`)."""
    weights = find_weights([entry.name for entry in directory.iterdir()])
    if weights is None or weights.index is None:
        return []
    path = directory / weights.index
    total = read_index(path).total_size
    if total in (None, size):
        return []
    message = f"`{path}` tells of {total:,} bytes of tensors; there are {size:,}"
    return [VerificationError(message, hint="the index is of another save: merge again")]


def move_under(tensor: Tensor, root: str, directory: str) -> Tensor:
    """A tensor found in `directory`, with its extents counted from the directory above that `root` names."""
    chunks = []
    for chunk in tensor.chunks:
        path = (PurePosixPath(directory) / chunk.extent.file.path).as_posix()
        chunks.append(replace(chunk, extent=replace(chunk.extent, file=SourceFile(root, path))))
    return replace(tensor, chunks=tuple(chunks))


def _check_literals(file: TargetFile, path: Path) -> list[UnshardError]:
    """The bytes that were known in advance; where seals were filled in, their places are not."""
    if file.seals:
        return []
    problems: list[UnshardError] = []
    with path.open("rb") as stream:
        for offset, data in file.literals:
            stream.seek(offset)
            if stream.read(len(data)) != data:
                message = f"`{path}`: the {len(data)} bytes at byte {offset} are not those that were planned"
                problems.append(VerificationError(message))
    return problems


def _check_json(path: Path) -> list[UnshardError]:
    try:
        json.loads(path.read_bytes())
    except ValueError as error:
        return [VerificationError(f"`{path}` is no JSON: {error}")]
    return []
