"""DeepSpeed's checkpoints: the directory of a tag with model states, and with partitions of the optimizer's masters."""

from unshard.formats.deepspeed.format import DeepSpeed

__all__ = ["DeepSpeed"]
