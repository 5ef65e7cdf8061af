"""What will be written: output names, dtypes, files and byte offsets. Here the layout is already final."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from unshard.checkpoint import Note
from unshard.model_files import is_adapter_file, is_weights_file
from unshard.tensors import Computed, Tensor, Value


@dataclass(frozen=True, slots=True)
class Seal:
    """Four bytes at `at` that hold the little-endian CRC-32 of the file's bytes `start <= i < stop`; `at` ≥ `stop`."""

    at: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class TargetFile:
    """One file to write.

    path:     relative to the output directory, forward slashes.
    size:     bytes in all.
    literals: (offset, bytes) known in advance: headers, whole small files.
    tensors:  (offset, value): each lies row-major from `offset`. An asset is a U8 tensor like any other.
    seals:    checksums to be filled in once the bytes they cover are written.
    last:     the file that makes the output whole (the index, or the only weights file): published after the others.
    """

    path: str
    size: int
    literals: tuple[tuple[int, bytes], ...] = ()
    tensors: tuple[tuple[int, Value], ...] = ()
    seals: tuple[Seal, ...] = ()
    last: bool = False

    @property
    def holds_weights(self) -> bool:
        """Whether the tensors are a model's (or an adapter's), and not a side file's bytes."""
        return is_weights_file(self.path)


@dataclass(frozen=True, slots=True)
class Claim:
    """Two tensors whose bytes must be equal, or the merge stops with `message`: replicas, tied weights."""

    left: Tensor
    right: Tensor
    message: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """All files of an output directory, the claims it rests on, and what the report must say about it."""

    files: tuple[TargetFile, ...]
    roots: Mapping[str, Path]
    claims: tuple[Claim, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def is_adapter(self) -> bool:
        """Whether there is no model in it, but a PEFT adapter alone."""
        return all(is_adapter_file(file.path) for file in self.files if file.holds_weights)

    @property
    def weights(self) -> list[Value]:
        """Every tensor of every weights file."""
        return [value for values in self.weights_by_directory.values() for value in values]

    @property
    def weights_by_directory(self) -> Mapping[str, Sequence[Value]]:
        """Directory, relative to the output ("." for itself) → every tensor of its weights files."""
        found: dict[str, list[Value]] = {}
        for file in self.files:
            if file.holds_weights:
                found.setdefault(str(PurePosixPath(file.path).parent), []).extend([value for _, value in file.tensors])
        return found

    @property
    def sources(self) -> Iterator[Tensor]:
        """Every tensor whose bytes reach the output, as they are or computed with."""
        for file in self.files:
            for _, value in file.tensors:
                yield from value.inputs if isinstance(value, Computed) else (value,)
