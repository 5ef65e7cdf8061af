"""The layouts on disk that can be read: one module or package each, registered here."""

from __future__ import annotations

from unshard.formats.contract import Format
from unshard.formats.fsdp import Fsdp
from unshard.formats.full import FullStateDict
from unshard.formats.huggingface.reader import HuggingFace
from unshard.formats.megatron.ranks import MegatronRanks

FORMATS: tuple[Format, ...] = (MegatronRanks(), Fsdp(), HuggingFace(), FullStateDict())
"""In the order in which they are asked: training state before the model files that may lie beside it."""
