"""Shards of a model by torch's HuggingFaceStorageWriter: safetensors files that hold a piece of each tensor."""

from unshard.formats.hf_shards.format import HfShards

__all__ = ["HfShards"]
