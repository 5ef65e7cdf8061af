"""The names of the files in a DCP directory (torch `distributed/checkpoint/filesystem.py`)."""

from __future__ import annotations

import re

METADATA = ".metadata"
RANK_METADATA = re.compile(r"__(\d{1,6})\.metadata")
"""Where ranks save without collectives (from torch 2.9 on), each has metadata of its own."""
UNFINISHED = re.compile(r"(__\d{1,9})?\.metadata\.tmp")
DATA = re.compile(r"__(\d{1,9})_\d+\.distcp")


def is_dcp_file(name: str) -> bool:
    """Whether a file belongs to a DCP directory, finished or not."""
    return name == METADATA or any(pattern.fullmatch(name) for pattern in (DATA, RANK_METADATA, UNFINISHED))


def rank_of(name: str) -> int | None:
    """The rank that wrote the file `__{rank}_{n}.distcp`; None for files of other names."""
    match = DATA.fullmatch(name.rpartition("/")[2])
    return int(match[1]) if match else None
