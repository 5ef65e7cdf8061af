"""The format of DeepSpeed's `engine.save_checkpoint`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from unshard.checkpoint import Checkpoint
from unshard.formats.contract import Source
from unshard.formats.deepspeed.files import CONVERTER, LATEST, describe, find_tags, is_of_tag, read_latest

_MAX_LOOKED_AT = 1 << 16


class DeepSpeed:
    """The format: the directory of one tag (`global_step500`), any file of it, or a directory whose `latest` names it.

    Its steps are the modules beside.
    """

    name = "deepspeed"
    backends: Sequence[str] = ("deepspeed",)

    def detect(self, path: Path) -> str | None:
        """By file names alone."""
        if path.is_file():
            return "one file of a DeepSpeed checkpoint" if is_of_tag(path.name) else None
        names = [entry.name for entry in islice(os.scandir(path), _MAX_LOOKED_AT)]
        tag = read_latest(path) if LATEST in names else None
        if tag is None or describe(names):
            return describe(names) or None
        tags = {place.name: place for place in find_tags(path)}
        if tag not in tags:
            is_run = tags or CONVERTER in names
            return f"a directory of DeepSpeed checkpoints without the latest, {tag}" if is_run else None
        return describe([entry.name for entry in islice(os.scandir(tags[tag]), _MAX_LOOKED_AT)])

    def read(self, source: Source) -> Checkpoint:
        """The catalog of all ranks. Raises FormatError and IncompleteError where nothing can be said at all."""
        from unshard.formats.deepspeed.reading import read_tag  # late: to detect takes names only

        return read_tag(source)
