"""The formats: what megatron-core's `dist_checkpointing` writes, and what Megatron-FSDP writes by torch's DCP."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unshard.checkpoint import Checkpoint
from unshard.errors import FormatError, IncompleteError, NotACheckpointError, UnshardError
from unshard.formats.contract import Source
from unshard.formats.megatron.distributed.file_names import SEAL
from unshard.formats.megatron.distributed.probing import Finding, find_distributed, is_fsdp

if TYPE_CHECKING:
    from unshard.formats.megatron.distributed.stored import Stored

_EARLIER = "take an earlier checkpoint of the run, or save this one again"


class MegatronDist:
    """Megatron-Core's distributed checkpoints, of the backends `torch_dist` and `zarr`."""

    name = "megatron_dist"
    backends: Sequence[str] = ("megatron",)

    def detect(self, path: Path) -> str | None:
        """By `metadata.json`; an unfinished save by what else it leaves."""
        found = find_distributed(path) if path.is_dir() else None
        if found is None:
            return None
        return f"{'a' if found.finished else 'an unfinished'} Megatron-Core distributed checkpoint ({found.backend})"

    def read(self, source: Source) -> Checkpoint:
        """The catalog. Raises IncompleteError where the save was cut short so that nothing can be read."""
        from unshard.formats.megatron.distributed.reading import to_checkpoint  # late: to detect takes little

        found = find_distributed(source.path)
        if found is None:
            raise NotACheckpointError(f"{source.path}: no {SEAL} of Megatron-Core lies there")
        stored = _read_stored(source, found)
        if not found.finished:
            stored.problems.insert(0, _unfinished(source.path))
        return to_checkpoint(source, stored, self.name, f"Megatron-Core {found.backend}")


class MegatronFsdp:
    """Megatron-FSDP's `fsdp_dtensor`: a torch DCP directory of megatron-core's parameters, sharded unevenly."""

    name = "megatron_fsdp"
    backends: Sequence[str] = ("megatron",)

    def detect(self, path: Path) -> str | None:
        """By the keys in `.metadata`, since nothing else tells it from other DCP directories."""
        return "a Megatron-FSDP checkpoint (fsdp_dtensor)" if path.is_dir() and is_fsdp(path) else None

    def read(self, source: Source) -> Checkpoint:
        """The catalog. Raises FormatError where `.metadata` cannot be read."""
        from unshard.formats.megatron.distributed.reading import is_weight, to_checkpoint
        from unshard.formats.megatron.distributed.torch_dist import read_torch_dist

        stored = read_torch_dist(source, is_weight)
        return to_checkpoint(source, stored, self.name, "Megatron-FSDP fsdp_dtensor")


def _read_stored(source: Source, found: Finding) -> Stored:
    from unshard.formats.megatron.distributed.reading import ROOT, is_weight
    from unshard.formats.megatron.distributed.torch_dist import read_torch_dist
    from unshard.formats.megatron.distributed.zarr import read_zarr

    if found.backend == "zarr":
        return read_zarr(source.path, ROOT, is_weight)
    if found.backend != "torch_dist":
        raise FormatError(
            f"{source.path / SEAL}: `sharded_backend` is {found.backend!r}; torch_dist and zarr are read",
            hint="save again with --dist-ckpt-format torch_dist",
        )
    return read_torch_dist(source, is_weight)


def _unfinished(directory: Path) -> UnshardError:
    return IncompleteError(
        f"{directory}: {SEAL} is missing, which Megatron writes last: the save was interrupted, or the copy",
        hint=f"copy {SEAL} too, or {_EARLIER}",
    )
