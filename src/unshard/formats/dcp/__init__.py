"""Directories of torch.distributed.checkpoint (DCP): `.metadata` beside `.distcp` files, read without PyTorch."""

from unshard.formats.dcp.container import Container, read_container
from unshard.formats.dcp.directory import Folder
from unshard.formats.dcp.objects import Item, read_item

__all__ = ["Container", "Folder", "Item", "read_container", "read_item"]
