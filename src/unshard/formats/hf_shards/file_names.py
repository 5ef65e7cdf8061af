"""The names of the shards (torch `distributed/checkpoint/_hf_utils.py`, `_gen_file_name`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_SHARD = re.compile(r"shard-(\d{1,9})-model-(\d{1,9})-of-(\d{1,9})\.safetensors")
SUBDIRECTORY = "sharded"
"""Where the shards lie of a save that torch also put together (`enable_consolidation`)."""
_CONSOLIDATED = "consolidated"
"""Where NeMo Automodel puts the model together, below its shards."""


@dataclass(frozen=True, slots=True, order=True)
class ShardName:
    """`shard-00003-model-00001-of-00002.safetensors`: the first of two files of shard 3, which rank 2 wrote."""

    shard: int
    file: int
    count: int

    @property
    def rank(self) -> int:
        """Shards are numbered from 1 (torch `hf_storage.py`, `prepare_global_plan`)."""
        return self.shard - 1

    def __str__(self) -> str:
        return f"shard-{self.shard:05d}-model-{self.file:05d}-of-{self.count:05d}.safetensors"


def parse_shard(name: str) -> ShardName | None:
    """What a file name says, or None if it is no shard's."""
    match = _SHARD.fullmatch(name)
    return ShardName(int(match[1]), int(match[2]), int(match[3])) if match else None


def holds_shards(directory: Path) -> bool:
    """Whether shards lie in a directory."""
    return directory.is_dir() and any(parse_shard(path.name) is not None for path in directory.iterdir())


def find_shards_near(directory: Path) -> Path | None:
    """Where the shards lie that the model in this directory was put together from, if they are still there."""
    places = [directory / SUBDIRECTORY]
    if directory.absolute().name == _CONSOLIDATED:
        places.append(directory.absolute().parent)
    return next((place for place in places if holds_shards(place)), None)
