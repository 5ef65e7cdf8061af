"""The format of Megatron-LM's legacy layout (`--ckpt-format torch`), and of verl's first, which has its directories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unshard.checkpoint import Checkpoint
from unshard.formats.contract import Source
from unshard.formats.megatron.ranks.directories import count_ranks


class MegatronRanks:
    """The format. Its steps are modules of this package: directories, contents, sizes, layers, joining."""

    name = "megatron"
    backends: Sequence[str] = ("megatron",)

    def detect(self, path: Path) -> str | None:
        """By the names of directories and files alone."""
        count, is_part = count_ranks(path)
        if not count:
            return None
        words = f"{count} Megatron rank{'s' if count > 1 else ''}"
        return f"one of {words}" if is_part and count > 1 else words

    def read(self, source: Source) -> Checkpoint:
        """The catalog of all ranks; where one of them is named, of all that it is one of."""
        from unshard.formats.megatron.ranks.reading import read_ranks  # late: to detect takes little

        return read_ranks(source, self.name)
