"""`.pt` files without PyTorch and without trust: archive, legacy stream, unpickler, records."""

from unshard.formats.torch_file.limits import DEFAULT_LIMITS, Limits
from unshard.formats.torch_file.reader import TorchFile, read_torch_file
from unshard.formats.torch_file.records import (
    Global,
    Opaque,
    Storage,
    StoredTensor,
    UnsupportedTensor,
    WrapperSubclass,
)

__all__ = [
    "DEFAULT_LIMITS",
    "Global",
    "Limits",
    "Opaque",
    "Storage",
    "StoredTensor",
    "TorchFile",
    "UnsupportedTensor",
    "WrapperSubclass",
    "read_torch_file",
]
