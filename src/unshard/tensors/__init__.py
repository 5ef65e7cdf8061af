"""Boxes, extents, chunks, tensors and their algebra. Nothing here reads a file."""

from unshard.tensors.box import Box, flat_range_boxes, row_major_strides
from unshard.tensors.chunk import ENCODINGS, Chunk, Encoded, Extent, SourceFile, contiguous_chunk
from unshard.tensors.computed import Computed, Value
from unshard.tensors.tensor import Tensor, concat, stack

__all__ = [
    "ENCODINGS",
    "Box",
    "Chunk",
    "Computed",
    "Encoded",
    "Extent",
    "SourceFile",
    "Tensor",
    "Value",
    "concat",
    "contiguous_chunk",
    "flat_range_boxes",
    "row_major_strides",
    "stack",
]
