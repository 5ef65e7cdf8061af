"""A checkpoint as Python sees it: names and lazy tensors, nothing read until it is asked for."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unshard.checkpoint import Checkpoint
from unshard.errors import UsageError, raise_all
from unshard.tensors import Tensor

if TYPE_CHECKING:
    from unshard.dtypes import Array


class LazyTensor:
    """A tensor of a checkpoint, assembled from its chunks when it is read.

    `tensor[1:3, :, 5]` is another lazy tensor: integers and slices with positive steps, at most one `...`. `numpy()`
    reads; `torch()` needs PyTorch.
    """

    def __init__(self, tensor: Tensor, roots: Mapping[str, Path]) -> None:
        self._tensor, self._roots = tensor, roots

    @property
    def name(self) -> str:
        return self._tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self._tensor.shape

    @property
    def dtype(self) -> str:
        """The safetensors name of the element type: "BF16"."""
        return self._tensor.dtype.name

    @property
    def chunks(self) -> int:
        """In how many pieces it lies on the disk, replicas included."""
        return len(self._tensor.chunks)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor of no axes has no length")
        return self.shape[0]

    def __getitem__(self, key: Any) -> LazyTensor:
        tensor, axis = self._tensor, 0
        for item in self._expand(key if isinstance(key, tuple) else (key,)):
            length = tensor.shape[axis]
            if isinstance(item, slice):
                start, stop, step = item.indices(length)
                if step < 1:
                    raise IndexError("slices of lazy tensors take a positive step")
                tensor = tensor.slice(axis, start, max(start, stop), step)
                axis += 1
            else:
                index = operator.index(item)
                if not -length <= index < length:
                    raise IndexError(f"index {index} is outside an axis of {length}")
                tensor = tensor.select(axis, index % length)
        return LazyTensor(tensor, self._roots)

    def _expand(self, keys: tuple[Any, ...]) -> tuple[Any, ...]:
        """The keys with whole slices in the place of an ellipsis. Raises IndexError for more keys than axes."""
        ellipses = [place for place, item in enumerate(keys) if item is Ellipsis]
        if len(ellipses) > 1:
            raise IndexError("an index can have one ellipsis only")
        if len(keys) - len(ellipses) > len(self.shape):
            raise IndexError(f"{len(keys) - len(ellipses)} indices for {len(self.shape)} axes")
        if not ellipses:
            return keys
        whole = (slice(None),) * (len(self.shape) - len(keys) + 1)
        return (*keys[: ellipses[0]], *whole, *keys[ellipses[0] + 1 :])

    def numpy(self) -> Array:
        """Read the elements into a new array; bf16 and the smaller floats come as types of ml_dtypes.

        Raises IncompleteError where chunks are missing, FormatError where a file cannot be read.
        """
        from unshard.plan.coverage import prove_coverage
        from unshard.run.gathering import read_tensor

        raise_all(prove_coverage(self._tensor))
        return read_tensor(self._tensor, self._roots)

    def torch(self) -> Any:
        """Read the elements as a torch tensor of the same type. Raises UsageError where PyTorch cannot hold them."""
        try:
            import torch
        except ImportError:
            raise UsageError("PyTorch is not installed", hint="pip install 'unshard[torch]'") from None
        dtype = getattr(torch, self._tensor.dtype.torch_name, None)
        if dtype is None:
            raise UsageError(f"torch {torch.__version__} has no {self._tensor.dtype.torch_name}: {self.name}")
        return torch.from_numpy(self.numpy().reshape(-1).view("uint8")).view(dtype).reshape(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __repr__(self) -> str:
        return f"LazyTensor({self.name}, {self.dtype}, {list(self.shape)}, {self.chunks} chunks)"


class CheckpointView(Mapping[str, LazyTensor]):
    """A mapping of stored names to lazy tensors, with the catalog behind it in `checkpoint`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    @property
    def config(self) -> Mapping[str, Any] | None:
        """The parsed config.json, if the checkpoint has one."""
        return self.checkpoint.config

    def __getitem__(self, name: str) -> LazyTensor:
        return LazyTensor(self.checkpoint.tensors[name], self.checkpoint.roots)

    def __iter__(self) -> Iterator[str]:
        return iter(self.checkpoint.tensors)

    def __len__(self) -> int:
        return len(self.checkpoint.tensors)

    def __repr__(self) -> str:
        return f"<{self.checkpoint.title}: {len(self)} tensors>"
