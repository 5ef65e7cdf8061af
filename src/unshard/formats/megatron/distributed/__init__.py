"""Megatron-Core's distributed checkpoints: `torch_dist` and `zarr`, and Megatron-FSDP's `fsdp_dtensor`."""

from unshard.formats.megatron.distributed.format import MegatronDist, MegatronFsdp

__all__ = ["MegatronDist", "MegatronFsdp"]
