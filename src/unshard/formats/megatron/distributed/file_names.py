"""The files by which a distributed checkpoint is told."""

SEAL = "metadata.json"
"""Written last: a checkpoint without it is not finished (megatron-core `dist_checkpointing/serialization.py`)."""
COMMON = "common.pt"
"""What is no tensor of the model; newer versions keep it among the items of `.metadata`."""
ARRAY = ".zarray"
"""In the directory of each array of a zarr checkpoint."""
