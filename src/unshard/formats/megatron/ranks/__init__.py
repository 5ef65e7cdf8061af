"""Megatron-LM's legacy layout: one directory per tensor-, pipeline- and expert-parallel rank, with a torch file."""

from unshard.formats.megatron.ranks.format import MegatronRanks

__all__ = ["MegatronRanks"]
