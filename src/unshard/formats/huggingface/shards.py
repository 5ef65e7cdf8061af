"""Which tensor goes into which weights file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unshard.errors import ModelError
from unshard.words import items_in_words


@dataclass(frozen=True, slots=True)
class Naming:
    """How the weights files of one container are called; `{}` is nothing, or `-00001-of-00005`."""

    pattern: str
    index: str

    @property
    def suffix(self) -> str:
        return self.pattern[self.pattern.index("}") + 1 :]


SAFETENSORS = Naming("model{}.safetensors", "model.safetensors.index.json")
BIN = Naming("pytorch_model{}.bin", "pytorch_model.bin.index.json")


def split_by_size(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in order, cut into groups of at most `limit` bytes; what is larger than that is a group of its own.

    As huggingface_hub does it (`split_state_dict_into_shards_factory`): a group stays open while a tensor that is too
    large goes by.
    """
    groups: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if size > limit:
            groups.append([name])
            continue
        if filled + size > limit:
            groups.append(current)
            current, filled = [], 0
        current.append(name)
        filled += size
    return [*groups, current] if current else groups


def assign_files(sizes: Mapping[str, int], limit: int, naming: Naming) -> dict[str, list[str]]:
    """File name → tensor names, by size."""
    return _name_files(split_by_size(sizes, limit), naming)


def follow_layout(names: Mapping[str, object], layout: Mapping[str, str], naming: Naming) -> dict[str, list[str]]:
    """File name → tensor names, as a reference model has them.

    Its file names are kept where they fit the container and an index can point to them; a model in one file, or in
    files of the other container, gets the usual names. Raises ModelError for tensors that the reference lacks.
    """
    unknown = [name for name in names if name not in layout]
    if unknown:
        shown = items_in_words(unknown, 5)
        raise ModelError(f"{len(unknown)} tensors lie in no file of the reference model: {shown}")
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(layout[name], []).append(name)
    files = sorted(groups)
    if len(files) > 1 and all(file.endswith(naming.suffix) for file in files):
        return {file: groups[file] for file in files}
    return _name_files([groups[file] for file in files], naming)


def _name_files(groups: list[list[str]], naming: Naming) -> dict[str, list[str]]:
    if len(groups) == 1:
        return {naming.pattern.format(""): groups[0]}
    count = len(groups)
    return {naming.pattern.format(f"-{number:05d}-of-{count:05d}"): group for number, group in enumerate(groups, 1)}
