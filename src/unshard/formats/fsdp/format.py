"""FSDP checkpoints of one file per rank, as verl, EasyR1, SkyRL, accelerate and scripts of one's own write them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unshard.checkpoint import Checkpoint
from unshard.errors import FormatError, UnshardError
from unshard.formats.contract import Source
from unshard.formats.fsdp.layouts import find_rank_files, group_of
from unshard.formats.fsdp.ranks import collect_ranks
from unshard.formats.fsdp.reading import read_ranks, stated_world
from unshard.formats.surroundings import read_first_json


class Fsdp:
    """The format. Its steps are the modules of this package: layouts, ranks, entries, gather, flat."""

    name = "fsdp"
    backends: Sequence[str] = ("fsdp", "fsdp2")

    def detect(self, path: Path) -> str | None:
        """By file names alone."""
        if path.is_file():
            group = group_of(path)
            return f"one of {len(group.ranks)} FSDP rank files" if group else None
        count = sum([len(group.ranks) for group in find_rank_files(path)])
        return f"{count} FSDP rank file{'s' if count > 1 else ''}" if count else None

    def read(self, source: Source) -> Checkpoint:
        """The catalog of all ranks; where a single file is named, of all ranks that it is one of.

        Raises NotACheckpointError where no rank files lie there, or those of several checkpoints.
        """
        problems: list[UnshardError] = []
        places = [directory / "fsdp_config.json" for directory in source.roots.values()]
        stated = read_first_json(places, problems) or {}
        found = collect_ranks(source, stated_world(stated))
        hint = "mend the file, or delete it, for it is not needed"
        found.problems += [FormatError(problem.message, hint=hint) for problem in problems]
        return read_ranks(source, found, stated, self.name)
