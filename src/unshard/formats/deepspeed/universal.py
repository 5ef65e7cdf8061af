"""The format of DeepSpeed's `ds_to_universal`: each trained parameter whole, in a folder of its own.

| below the directory of a tag                      | what                                               |
|---------------------------------------------------|----------------------------------------------------|
| `zero/{NAME}/fp32.pt`                             | the master of a parameter (`universal_reading.py`) |
| `zero/{NAME}/{exp_avg,exp_avg_sq,step}.pt`        | its optimizer states                               |
| `zero/optimizer_state.pt`                         | what the optimizer says of all parameters          |
| `[zero_pp_rank_{D}_]mp_rank_{TT}_model_states.pt` | all else, as the job saved it                      |

The converter writes `latest_universal` beside the directory; `latest` goes on naming what the job saved last. Source:
DeepSpeed `checkpoint/ds_to_universal.py`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from unshard.checkpoint import Checkpoint
from unshard.formats.contract import Source
from unshard.formats.deepspeed.files import LATEST, find_tags, is_of_tag, read_latest

LATEST_UNIVERSAL = "latest_universal"
"""The file in which a directory of tags names the last one that was converted."""
ZERO = "zero"
"""The folder of all parameters' folders."""
MASTER = "fp32.pt"
_STATES = (MASTER, "exp_avg.pt", "exp_avg_sq.pt", "step.pt")
_OPTIMIZER = "optimizer_state.pt"
_MAX_LOOKED_AT = 16


class DeepSpeedUniversal:
    """The format: the directory that the converter wrote, a file of it, or a directory that names it.

    To be asked before DeepSpeed's own format, which takes the model states in this directory for a whole checkpoint.
    """

    name = "deepspeed_universal"
    backends: Sequence[str] = ("deepspeed",)

    def detect(self, path: Path) -> str | None:
        """By file names, and by `latest` and `latest_universal`."""
        if place_of(path):
            return "a universal checkpoint of DeepSpeed"
        lost = lost_place(path)
        return f"a directory of universal checkpoints without the latest, {lost[0].name}" if lost else None

    def read(self, source: Source) -> Checkpoint:
        """The catalog. Raises FormatError and IncompleteError where no model states can be read."""
        from unshard.formats.deepspeed.universal_reading import read_universal  # late: to detect takes names only

        return read_universal(source)


def place_of(path: Path) -> Path | None:
    """The directory that the converter wrote, where `path` is it, is a file of it, or names it; else None.

    What `latest` names is what the job saved last, and goes before what was converted once.
    """
    if path.is_file():
        above = path.absolute().parents
        is_state = path.name in _STATES and len(above) > 2 and above[1].name == ZERO
        place = above[2] if is_state else above[0]
        return place if (is_state or is_of_tag(path.name)) and _is_universal(place) else None
    if _is_universal(path):
        return path
    name = read_latest(path, pointer_in(path))
    return path / name if name is not None and _is_universal(path / name) else None


def lost_place(path: Path) -> tuple[Path, list[Path]] | None:
    """What `latest_universal` names where that is not there, and the universal checkpoints that are; None otherwise."""
    if not path.is_dir() or pointer_in(path) == LATEST:
        return None
    name = read_latest(path, LATEST_UNIVERSAL)
    if name is None or (path / name).exists():
        return None
    there = [tag for tag in find_tags(path) if _is_universal(tag)]
    return (path / name, there) if there else None


def pointer_in(directory: Path) -> str:
    """The file that names the tag which is meant."""
    return LATEST if (directory / LATEST).is_file() else LATEST_UNIVERSAL


def _is_universal(directory: Path) -> bool:
    zero = directory / ZERO
    if not zero.is_dir():
        return False
    folders = [zero / entry.name for entry in islice(os.scandir(zero), _MAX_LOOKED_AT)]
    return (zero / _OPTIMIZER).is_file() or any((folder / name).is_file() for folder in folders for name in _STATES)
