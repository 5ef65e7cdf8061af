"""The index of a model in several weights files: which tensor lies in which file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unshard.errors import FormatError
from unshard.formats.huggingface.assets import read_small_file
from unshard.formats.json_text import JsonText
from unshard.words import items_in_words, shorten

MAX_INDEX_SIZE = 100_000_000
"""Bytes. The index of a model of 100,000 tensors has about ten million."""

_UNSAFE = re.compile(r"[\x00-\x1f\x7f/\\:]")


@dataclass(frozen=True, slots=True)
class Index:
    """What `model.safetensors.index.json` says.

    weight_map: tensor name → name of a file in the same directory.
    metadata:   `total_size`: bytes of all tensors; `total_parameters`: their elements; what else a writer put there.
    """

    weight_map: Mapping[str, str]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        """The files that it names, in order of their names."""
        return sorted(set(self.weight_map.values()))

    @property
    def total_size(self) -> int | None:
        """Bytes of all tensors, or None where the index does not say."""
        size = self.metadata.get("total_size")
        if isinstance(size, float) and size.is_integer():
            size = int(size)
        return size if type(size) is int else None

    def render(self) -> bytes:
        """The file's text as transformers writes it (`PreTrainedModel.save_pretrained`)."""
        content = {"metadata": dict(self.metadata), "weight_map": dict(self.weight_map)}
        return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode("ascii")


def read_index(path: Path) -> Index:
    """The index at `path`. Raises FormatError for a malformed one, and for names that lead out of its directory."""
    data = read_small_file(path, MAX_INDEX_SIZE)
    try:
        index = _parse(JsonText(data.decode("utf-8")))
    except ValueError as error:
        raise FormatError(f"{path}: not a valid index: {error}", hint=_REPLACE) from None
    unsafe = [name for name in index.files if not is_plain_file_name(name)]
    if unsafe:
        shown = items_in_words([repr(shorten(name, 80)) for name in unsafe], 5)
        raise FormatError(f"{path}: weights must lie in the same directory, but the index names {shown}", hint=_REPLACE)
    return index


_REPLACE = "fetch the index again, or delete it: the weights files are then read as they are"


def is_plain_file_name(name: str) -> bool:
    """Whether the name is a file in its own directory on every system: no path, no drive, no control characters."""
    return name not in {"", ".", ".."} and len(name) <= 255 and not _UNSAFE.search(name)


def _parse(text: JsonText) -> Index:
    weight_map: dict[str, str] | None = None
    metadata: dict[str, Any] = {}
    for name in text.members():
        if name == "weight_map":
            weight_map = text.strings()
        elif name == "metadata" and text.peek() == "{":
            metadata = {key: text.value() for key in text.members()}
        else:
            text.value()
    text.expect_end()
    if weight_map is None:
        raise ValueError("no weight_map")
    return Index(weight_map, metadata)
