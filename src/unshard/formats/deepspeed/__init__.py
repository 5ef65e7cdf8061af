"""DeepSpeed's checkpoints: the directory of a tag with model states, and with partitions of the optimizer's masters.

Also what `ds_to_universal` makes of one.
"""

from unshard.formats.deepspeed.format import DeepSpeed
from unshard.formats.deepspeed.universal import DeepSpeedUniversal

__all__ = ["DeepSpeed", "DeepSpeedUniversal"]
