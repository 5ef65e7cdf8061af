"""`.pt` files without PyTorch and without trust: archive, legacy stream, unpickler, records."""
