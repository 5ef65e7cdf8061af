"""The format: a model that each rank saved its pieces of, in safetensors files of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unshard.checkpoint import Checkpoint
from unshard.formats.contract import Source
from unshard.formats.hf_shards.file_names import parse_shard
from unshard.words import count_in_words


class HfShards:
    """`dcp.save` with a HuggingFaceStorageWriter whose `save_distributed` is true. See `formats.contract.Format`."""

    name = "hf_shards"
    backends: Sequence[str] = ("fsdp", "fsdp2")

    def detect(self, path: Path) -> str | None:
        """By file names alone."""
        if not path.is_dir():
            return None
        ranks = {shard.rank for entry in path.iterdir() if (shard := parse_shard(entry.name)) is not None}
        return f"torch's safetensors shards ({count_in_words(len(ranks), 'rank')})" if ranks else None

    def read(self, source: Source) -> Checkpoint:
        """The catalog of the model. Raises what `dcp.roots.choose_model` raises."""
        from unshard.formats.hf_shards.catalog import read_model  # late: to detect takes little

        return read_model(source, self.name)
