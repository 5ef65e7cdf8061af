"""A state dict in one torch file: `model.pt`, accelerate's `pytorch_model_fsdp.bin`, any file that is named.

Also a whole model of Meta's Llama (`consolidated.00.pth`), whose names and layouts torchtitan has.

`pytorch_model.bin`, whole or with an index, is a Hugging Face directory's and is read by `formats.huggingface`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from unshard.checkpoint import Checkpoint, Dialect
from unshard.errors import NotACheckpointError, command_line
from unshard.formats.contract import Source
from unshard.formats.dcp.titan_names import is_torchtitan
from unshard.formats.fsdp.layouts import RankFiles
from unshard.formats.fsdp.ranks import RankFile, RankSet
from unshard.formats.fsdp.reading import read_ranks
from unshard.tensors import SourceFile

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_USUAL_NAME = re.compile(
    r"(pytorch_model_fsdp(_\d+)?\.bin|(pytorch_|full_)?(model|model_state|state_dict|consolidated)\.(pt|pth|bin|ckpt))"
)


class FullStateDict:
    """The format. In a directory only files of usual names are found; others must be named."""

    name = "full"
    backends: Sequence[str] = ("fsdp", "fsdp2")

    def detect(self, path: Path) -> str | None:
        """By file names alone."""
        if path.is_file():
            return "a torch file" if path.suffix in SUFFIXES else None
        names = [file.name for file in _usual_files(path)]
        return f"a torch file, {names[0]}" if len(names) == 1 else f"{len(names)} torch files" if names else None

    def read(self, source: Source) -> Checkpoint:
        """The catalog of one file, through the same door as the file of a rank: it may be the only one there was.

        Raises NotACheckpointError where a directory holds several files, or none.
        """
        path = source.path if source.path.is_file() else _only_file(source.path)
        group = RankFiles(path.name, "file", ranks={0: path})
        file = RankFile(path, SourceFile("source", path.name))
        checkpoint = read_ranks(source, RankSet(group, {0: file}, [path.parent]), {}, self.name)
        dialect: Dialect = "torchtitan" if is_torchtitan(checkpoint.tensors) else "huggingface"
        return replace(checkpoint, title=f"{path.name}: {checkpoint.title}", dialect=dialect)


def _usual_files(directory: Path) -> list[Path]:
    return sorted([path for path in directory.iterdir() if _USUAL_NAME.fullmatch(path.name) and path.is_file()])


def _only_file(directory: Path) -> Path:
    files = _usual_files(directory)
    if len(files) == 1:
        return files[0]
    listed = ", ".join([path.name for path in files]) or "no torch file of a usual name"
    raise NotACheckpointError(
        f"{directory}: {listed}",
        hint="name the file: " + command_line("unshard", "inspect", files[0] if files else directory / "FILE"),
    )
