"""Directories of torch.distributed.checkpoint (DCP): `.metadata` beside `.distcp` files, read without PyTorch.

`container` reads any of them, for the formats that are built on it; `format` is that of models of transformers.
"""

from unshard.formats.dcp.format import Dcp

__all__ = ["Dcp"]
