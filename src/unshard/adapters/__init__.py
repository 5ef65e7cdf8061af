"""LoRA adapters in training checkpoints: told apart from the base model, described as PEFT does, fused on request."""

from unshard.adapters.fuse import Fused, fuse, fuse_all
from unshard.adapters.names import strip_names
from unshard.adapters.split import Split, split

__all__ = ["Fused", "Split", "fuse", "fuse_all", "split", "strip_names"]
