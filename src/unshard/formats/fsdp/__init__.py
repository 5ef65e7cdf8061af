"""FSDP checkpoints of one file per rank: DTensor, ShardedTensor, flat parameters and plain tensors."""

from unshard.formats.fsdp.format import Fsdp

__all__ = ["Fsdp"]
