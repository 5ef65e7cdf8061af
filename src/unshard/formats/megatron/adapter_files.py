"""LoRA adapters as verl first saved them beside Megatron's weights: one torch file per rank.

`adapter_checkpoint/mp_rank_TT[_PPP][_EEE]_adapter.pt` holds `{"adapter_state_dict": {name: tensor}}`: the parameters
of that rank's first virtual stage whose names contain `.adapter.`, layers numbered from zero. Source: volcengine/verl
verl/utils/megatron_peft_utils.py (`save_adapter_checkpoint`). How the ranks' shards lie is told as for the weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from unshard.checkpoint import Checkpoint
from unshard.formats.contract import Source
from unshard.formats.huggingface.assets import list_directory

ROOT = "adapter"
DIRECTORY = "adapter_checkpoint"
FILE = re.compile(r"(?P<rank>mp_rank_(?P<tensor>\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?)_adapter\.pt")


class VerlAdapter:
    """The format: the adapters alone, which merge into a PEFT directory."""

    name = "megatron_adapter"
    backends: Sequence[str] = ("megatron",)

    def detect(self, path: Path) -> str | None:
        """By file names alone; a file stands for all of its ranks."""
        if path.is_file():
            return self.detect(path.absolute().parent) if FILE.fullmatch(path.name) else None
        count = len(list_adapter_files(path)) if path.is_dir() else 0
        return f"the LoRA adapters of {count} Megatron rank{'s' if count > 1 else ''} (verl)" if count else None

    def read(self, source: Source) -> Checkpoint:
        """The catalog of all ranks. Raises NotACheckpointError where there are none."""
        from unshard.formats.megatron.adapter_reading import read_adapter_files  # late: to detect takes little
        from unshard.formats.megatron.beside import look_beside

        directory = source.path.absolute().parent if source.path.is_file() else source.path
        beside = look_beside(directory)
        found = read_adapter_files(directory, source.add_told(beside.facts), source.axes)
        checkpoint = Checkpoint(
            format=self.name,
            title=f"Megatron LoRA adapters, {len(list_adapter_files(directory))} ranks",
            roots={ROOT: directory},
            tensors=found.tensors,
            mesh=found.mesh,
            dialect="megatron",
            notes=tuple(found.notes),
            problems=tuple(found.problems),
        )
        return beside.around(checkpoint)


def list_adapter_files(directory: Path) -> list[str]:
    """The names of the ranks' files."""
    return [entry.name for entry in list_directory(directory) if FILE.fullmatch(entry.name)]
