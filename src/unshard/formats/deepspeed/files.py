"""The files of a tag's directory, told apart by their names.

| name                                                    | what                                                       |
|---------------------------------------------------------|------------------------------------------------------------|
| `mp_rank_{TT}_model_states.pt`                          | the module of one model-parallel rank, whole (stages 0-2)  |
| `zero_pp_rank_{D}_mp_rank_{TT}_model_states.pt`         | what one data-parallel rank says of it (stage 3)           |
| `[bf16_]zero_pp_rank_{D}_mp_rank_{TT}_optim_states.pt`  | that rank's partition of the masters                       |
| `[layer_{L}_]expert_{E}_mp_rank_{TT}_model_states.pt`   | one expert                                                 |
| `layer_{LL}[-model_{TT}]-model_states.pt`               | one layer of a pipeline                                    |

`pp_rank` is the data-parallel rank. Old releases left out the underscore in front of `optim`. Source: DeepSpeed
`runtime/engine.py` (`_get_ckpt_name`, `_get_zero_ckpt_name`, `_get_expert_ckpt_name`), `runtime/pipe/module.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeVar

from unshard.errors import NotACheckpointError, command_line
from unshard.formats.contract import Source
from unshard.formats.huggingface.index import is_plain_file_name
from unshard.tensors import SourceFile
from unshard.words import items_in_words

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<dp>\d{1,7})_)?mp_rank_(?P<mp>\d{1,6})_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(?P<dp>\d{1,7})_mp_rank_(?P<mp>\d{1,6})_?optim_states\.pt")
_EXPERT = re.compile(
    r"(?:layer_(?P<layer>\d{1,6})_)?expert_(?P<expert>\d{1,6})_mp_rank_(?P<mp>\d{1,6})_model_states\.pt"
)
_LAYER = re.compile(r"layer_(?P<layer>\d{1,6})(?:-model_(?P<mp>\d{1,6}))?-model_states\.pt")
_MAX_FILES = 1 << 20
Place = TypeVar("Place")

LATEST = "latest"
"""The file in which a directory of tags names its last one."""
_MAX_TRACKER = 4096
CONVERTER = "zero_to_fp32.py"
"""The script that DeepSpeed puts beside the directories of tags."""


@dataclass(frozen=True, slots=True)
class File:
    """One file: where it is, and how the catalog names it."""

    path: Path
    name: SourceFile


@dataclass(slots=True)
class TagFiles:
    """All files of a tag. Ranks are numbers in their names; D is a data-parallel rank, M a model-parallel one.

    model:     (D, M) → model states; D is None where one file stands for all.
    optimizer: (D, M) → optimizer states.
    experts:   (MoE layer, expert, M) → one expert; the layer is None in the names of old releases.
    layers:    (layer, tensor rank) → one layer of a pipeline.
    rivals:    pairs of files of different names that stand for the same: those of two runs.
    """

    model: dict[tuple[int | None, int], File] = field(default_factory=dict)
    optimizer: dict[tuple[int, int], File] = field(default_factory=dict)
    experts: dict[tuple[int | None, int, int], File] = field(default_factory=dict)
    layers: dict[tuple[int, int], File] = field(default_factory=dict)
    rivals: list[tuple[File, File]] = field(default_factory=list)

    def add(self, file: File) -> None:
        """Take a file in, if its name is one of those above and no file of another root stands for the same."""
        name = file.path.name
        if match := _MODEL.fullmatch(name):
            rank = int(match["dp"]) if match["dp"] else None
            self._put(self.model, (rank, int(match["mp"])), file)
        elif match := _OPTIMIZER.fullmatch(name):
            self._put(self.optimizer, (int(match["dp"]), int(match["mp"])), file)
        elif match := _EXPERT.fullmatch(name):
            layer = int(match["layer"]) if match["layer"] else None
            self._put(self.experts, (layer, int(match["expert"]), int(match["mp"])), file)
        elif match := _LAYER.fullmatch(name):
            self._put(self.layers, (int(match["layer"]), int(match["mp"] or 0)), file)

    def _put(self, files: dict[Place, File], place: Place, file: File) -> None:
        other = files.setdefault(place, file)
        if other.path.name != file.path.name:
            self.rivals.append((other, file))

    def find_rivals(self) -> list[tuple[File, File]]:
        """All pairs of which only one file can be of this save; of model states, one or one per rank is written."""
        whole = {rank: file for (data_rank, rank), file in self.model.items() if data_rank is None}
        pieces: dict[int, File] = {}
        for (data_rank, rank), file in self.model.items():
            if data_rank is not None:
                pieces.setdefault(rank, file)
        return [*self.rivals, *[(file, pieces[rank]) for rank, file in whole.items() if rank in pieces]]

    @property
    def is_empty(self) -> bool:
        return not (self.model or self.optimizer or self.layers)


def is_of_tag(name: str) -> bool:
    """Whether a file of that name lies in the directory of a tag, and nowhere else."""
    return any(pattern.fullmatch(name) for pattern in (_MODEL, _OPTIMIZER, _LAYER))


def is_of_another_place(name: str, saved_as: str) -> bool:
    """Whether a file was saved under the name of another rank, expert or layer; names of no such file tell nothing."""
    for pattern in (_MODEL, _OPTIMIZER, _EXPERT, _LAYER):
        now, then = pattern.fullmatch(name), pattern.fullmatch(f"{saved_as}.pt")
        if now and then:
            places = zip(now.groups(), then.groups(), strict=True)
            return any(one is not None and other is not None and int(one) != int(other) for one, other in places)
    return False


def find_files(roots: Mapping[str, Path], tag: str) -> TagFiles:
    """The files of a tag under all roots. A further root may be the tag's directory, or have one of its name."""
    found = TagFiles()
    for root, directory in roots.items():
        for relative, place in (("", directory), (f"{tag}/", directory / tag)):
            for name in sorted(_names_in(place)):
                found.add(File(place / name, SourceFile(root, relative + name)))
    return found


def find_tag(source: Source) -> tuple[Path, bool]:
    """The directory of a tag, and whether it is the one that `latest` names; else it is the source, or has its file.

    Raises NotACheckpointError where the tag that is named is not there.
    """
    if not source.path.is_dir():
        return source.path.absolute().parent, False
    name = read_latest(source.path)
    if name is None or describe(_names_in(source.path)):
        return source.path, False
    tags = find_tags(source.path)
    if source.path / name in tags:
        return source.path / name, True
    there = items_in_words([tag.name for tag in tags])
    raise NotACheckpointError(
        f"{source.path / LATEST} says that {name} is the latest tag, but no such directory of a checkpoint is there"
        + (f"; there {'is' if len(tags) == 1 else 'are'} {there}" if tags else ""),
        hint="name a tag that is there: " + command_line("unshard", "inspect", tags[-1])
        if tags
        else "fetch the whole directory; " + command_line("ls", source.path),
    )


def read_latest(directory: Path, tracker: str = LATEST) -> str | None:
    """The tag that the file `tracker` names, or None where it names none."""
    try:
        with (directory / tracker).open("rb") as file:
            text = file.read(_MAX_TRACKER).decode().strip()
    except (OSError, ValueError):
        return None
    return text if is_plain_file_name(text) else None


def find_tags(directory: Path) -> list[Path]:
    """The directories of tags in a directory, in order of their names."""
    return sorted([place for place in directory.iterdir() if place.is_dir() and describe(_names_in(place))])


def describe(files: Iterable[str]) -> str:
    """What lies in a directory of files of these names, in a few words; "" if it is no directory of a tag."""
    found = TagFiles()
    for name in files:
        found.add(File(Path(name), SourceFile("", name)))
    if found.is_empty:
        return ""
    if found.layers:
        return f"a DeepSpeed checkpoint, {len({layer for layer, _ in found.layers})} layers of a pipeline"
    ranks = {rank for rank, _ in found.optimizer}
    if not ranks:
        return "a DeepSpeed checkpoint, model states alone"
    return f"a DeepSpeed checkpoint, ZeRO partitions of {len(ranks)} rank{'s' if len(ranks) > 1 else ''}"


def _names_in(directory: Path) -> Iterator[str]:
    try:
        yield from [entry.name for entry in islice(os.scandir(directory), _MAX_FILES)]
    except (FileNotFoundError, NotADirectoryError):
        return
