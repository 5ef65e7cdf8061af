"""The layouts on disk that can be read: one module or package each, registered here."""

from __future__ import annotations

from unshard.formats.contract import Format
from unshard.formats.dcp import Dcp
from unshard.formats.deepspeed import DeepSpeed, DeepSpeedUniversal
from unshard.formats.fsdp import Fsdp
from unshard.formats.full import FullStateDict
from unshard.formats.hf_shards import HfShards
from unshard.formats.huggingface.reader import HuggingFace
from unshard.formats.megatron.adapter_files import VerlAdapter
from unshard.formats.megatron.distributed import MegatronDist, MegatronFsdp
from unshard.formats.megatron.ranks import MegatronRanks
from unshard.formats.megatron.verl import Verl

FORMATS: tuple[Format, ...] = (
    MegatronRanks(),
    Fsdp(),
    Verl(),
    MegatronDist(),
    MegatronFsdp(),
    Dcp(),
    HfShards(),
    DeepSpeedUniversal(),
    DeepSpeed(),
    VerlAdapter(),
    HuggingFace(),
    FullStateDict(),
)
"""In the order in which they are asked: training state before the model files that may lie beside it, and
what is made from another format before that format, whose files it keeps."""
