"""The format: a model saved by torch.distributed.checkpoint, alone or among the other states of its training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unshard.checkpoint import Checkpoint
from unshard.formats.contract import Source
from unshard.formats.dcp.file_names import is_dcp_file, rank_of
from unshard.formats.megatron.distributed.probing import find_distributed, is_fsdp
from unshard.words import count_in_words


class Dcp:
    """What FSDP, accelerate, Lightning, torchtitan and others save by `dcp.save`. Megatron's are other formats."""

    name = "dcp"
    backends: Sequence[str] = ("fsdp", "fsdp2")

    def detect(self, path: Path) -> str | None:
        """By file names, and a look into `.metadata` that rules Megatron out. An interrupted save counts too."""
        names = [entry.name for entry in path.iterdir() if is_dcp_file(entry.name)] if path.is_dir() else []
        if not names or find_distributed(path) is not None or is_fsdp(path):
            return None
        count = len([name for name in names if rank_of(name) is not None])
        return f"a torch DCP directory ({count_in_words(count, 'file')})"

    def read(self, source: Source) -> Checkpoint:
        """The catalog of the model. Raises what `container.open_container` and `roots.choose_model` raise."""
        from unshard.formats.dcp.catalog import read_model  # late: to detect takes little

        return read_model(source, self.name)
