"""Which weights files of a directory are the model, in the order in which transformers looks for them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from unshard.errors import IncompleteError, UnshardError
from unshard.formats.huggingface.shards import BIN, SAFETENSORS, Naming

_NUMBERED = re.compile(r"-(\d+)-of-(\d+)\.")
_MODEL_FILE = re.compile(r"(model(-\d+-of-\d+)?\.safetensors|pytorch_model(-\d+-of-\d+)?\.bin)(\.index\.json)?")
_ANY_INDEX = ".safetensors.index.json"
"""How the index of a model with other names ends, such as those of diffusers."""
_DISTRIBUTED = "shard-"
"""The prefix of torch DCP's per-rank safetensors files: pieces of tensors, not a model."""


@dataclass(frozen=True, slots=True)
class WeightsFiles:
    """What is to be read.

    kind:       "safetensors" or "bin".
    files:      names of weights files; with an index, those that it names take their place.
    index:      the name of the index, or None.
    is_adapter: a PEFT adapter, not a model.
    usual:      whether transformers would find these files by itself.
    """

    kind: str
    files: tuple[str, ...]
    index: str | None = None
    is_adapter: bool = False
    usual: bool = True

    def __str__(self) -> str:
        what = "a PEFT adapter" if self.is_adapter else "a Hugging Face model"
        if self.index:
            return f"{what}, {self.kind} files with an index"
        return f"{what}, {self.files[0]}" if len(self.files) == 1 else f"{what}, {len(self.files)} {self.kind} files"


def find_weights(names: Collection[str]) -> WeightsFiles | None:
    """The weights among the file names of a directory, or None."""
    for kind, naming in (("safetensors", SAFETENSORS), ("bin", BIN)):
        found = _find(names, kind, naming)
        if found:
            return found
    for kind in ("safetensors", "bin"):
        if f"adapter_model.{kind}" in names:
            return WeightsFiles(kind, (f"adapter_model.{kind}",), is_adapter=True)
    others = [name for name in names if name.endswith(SAFETENSORS.suffix) and not name.startswith(_DISTRIBUTED)]
    indexes = [name for name in names if name.endswith(_ANY_INDEX)]
    if others and len(indexes) == 1:
        return WeightsFiles("safetensors", (), indexes[0], usual=False)
    return WeightsFiles("safetensors", tuple(sorted(others)), usual=False) if others else None


def _find(names: Collection[str], kind: str, naming: Naming) -> WeightsFiles | None:
    single = naming.pattern.format("")
    if single in names:
        return WeightsFiles(kind, (single,))
    if naming.index in names:
        return WeightsFiles(kind, (), naming.index)
    stem = single.removesuffix(naming.suffix)
    shards = [name for name in names if re.fullmatch(rf"{stem}-\d+-of-\d+{re.escape(naming.suffix)}", name)]
    return WeightsFiles(kind, tuple(sorted(shards)), usual=False) if shards else None


def find_leftovers(names: Collection[str], read: Collection[str]) -> list[str]:
    """Files called like a model's weights that are not read: another container's, or an older save's."""
    return [name for name in names if name not in read and _MODEL_FILE.fullmatch(name)]


def find_siblings(names: Collection[str], files: Collection[str]) -> list[str]:
    """The names that are numbered as some of the files are, and are not among them: `model-00003-of-00003.safetensors`
    beside `model-00001-of-00003.safetensors`.
    """
    kinds = {_NUMBERED.sub(r"-of-\2.", file) for file in files if _NUMBERED.search(file)}
    found = [name for name in names if _NUMBERED.search(name) and _NUMBERED.sub(r"-of-\2.", name) in kinds]
    return sorted(set(found) - set(files))


def check_numbering(files: Sequence[str]) -> list[UnshardError]:
    """What is wrong with the numbers in the names of shards that no index lists."""
    numbers: dict[int, set[int]] = {}
    for file in files:
        match = _NUMBERED.search(file)
        if match:
            numbers.setdefault(int(match[2]), set()).add(int(match[1]))
    if len(numbers) > 1:
        counts = " and ".join(f"{len(found)} of {count}" for count, found in sorted(numbers.items()))
        return [IncompleteError(f"the shards are from several saves: {counts}", hint="delete those of the older saves")]
    for count, found in numbers.items():
        start = min({1, *found})  # some tools count from 0
        inside = {number for number in found if number < start + count}
        if strays := sorted(found - inside):
            message = f"a weights file has number {strays[0]}, which is none of {count}"
            return [IncompleteError(message, hint="delete the files that do not belong to this save")]
        missing = count - len(inside)
        if missing:
            first = next(number for number in range(start, start + count) if number not in inside)
            message = f"{missing} of {count} weights files are missing, the first of them number {first}"
            return [IncompleteError(message, hint="fetch the missing files")]
    return []
