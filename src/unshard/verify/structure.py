"""Structure: which files there are, and what their headers say, read again from the disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from unshard.errors import UnshardError, VerificationError, raise_all
from unshard.formats.contract import Source
from unshard.formats.huggingface.reader import HuggingFace
from unshard.target import Target, TargetFile
from unshard.tensors import SourceFile, Tensor

OUTPUT_ROOT = "output"
"""The root name of the output directory in what is found there."""


def check_files(target: Target, output: Path) -> list[UnshardError]:
    """Exactly the planned files lie in the output, each of its planned size, with its known bytes; JSON parses."""
    problems: list[UnshardError] = []
    expected = {file.path: file for file in target.files}
    found = {path.relative_to(output).as_posix(): path for path in output.rglob("*") if not path.is_dir()}
    missing, surplus = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
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
        if name.endswith(".json"):
            problems += _check_json(path)
        if name.endswith(".safetensors"):
            problems += ask_safetensors(path)
    return problems


def read_weights(target: Target, output: Path) -> Mapping[str, Mapping[str, Tensor]]:
    """Directory (relative to the output) → the tensors that its weights files hold, by their own headers and index.

    Raises VerificationError where a directory does not hold exactly the planned names.
    """
    expected: dict[str, list[str]] = {}
    for file in target.files:
        if file.holds_weights:
            names = expected.setdefault(str(PurePosixPath(file.path).parent), [])
            names += [value.name for _, value in file.tensors]
    tensors: dict[str, Mapping[str, Tensor]] = {}
    problems: list[UnshardError] = []
    for directory, names in expected.items():
        catalog = HuggingFace().read(Source(output / directory))
        problems += catalog.problems
        missing = [name for name in names if name not in catalog.tensors]
        surplus = sorted(set(catalog.tensors) - set(names))
        problems += [VerificationError(f"`{name}` was planned, but no weights file holds it") for name in missing]
        problems += [VerificationError(f"`{name}` is in a weights file, but was not planned") for name in surplus]
        tensors[directory] = {name: _under_output(tensor, directory) for name, tensor in catalog.tensors.items()}
    raise_all(problems)
    return tensors


def ask_safetensors(path: Path) -> list[UnshardError]:
    """The safetensors library's own opinion of a file's header."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            file.keys()
    except (SafetensorError, OSError) as error:
        return [VerificationError(f"`{path}`: the safetensors library refuses it: {error}")]
    return []


def _under_output(tensor: Tensor, directory: str) -> Tensor:
    """The tensor with its extents counted from the output directory."""
    chunks = []
    for chunk in tensor.chunks:
        path = (PurePosixPath(directory) / chunk.extent.file.path).as_posix()
        chunks.append(replace(chunk, extent=replace(chunk.extent, file=SourceFile(OUTPUT_ROOT, path))))
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
