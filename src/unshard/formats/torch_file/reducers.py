"""The calls that we know, as functions of their arguments: torch's own tensor reducers and a few plain values.

Sources: torch `_utils.py`, `_tensor.py`; what `pickle` itself makes of `collections`, `_codecs` and `copyreg`. Nothing
here imports or calls what the file names. Arguments of an unexpected kind raise ValueError or TypeError, which the
builder reports.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from math import prod
from typing import Any, TypeAlias

from unshard.dtypes import DType
from unshard.errors import FormatError
from unshard.formats.torch_file.limits import DEFAULT_LIMITS
from unshard.formats.torch_file.machine import Budget
from unshard.formats.torch_file.records import (
    Global,
    Opaque,
    Storage,
    StoredTensor,
    UnsupportedTensor,
    WrapperSubclass,
)
from unshard.formats.torch_file.storages import OTHER_ITEM_SIZES

Reducer: TypeAlias = Callable[[Global, tuple[Any, ...], Budget], Any]

LARGEST_COUNT = (1 << 63) - 1


def merge_states(old: Any, new: Any, budget: Budget) -> Any:
    """What BUILD makes of a state. A `(dict or None, dict of slots)` pair is one dict.

    Copies are paid for; they are made of dicts with text keys only, whose hashes nobody can make collide.
    """
    if isinstance(new, tuple) and len(new) == 2 and isinstance(new[1], dict) and isinstance(new[0], (dict, type(None))):
        new = merge_states(new[0], new[1], budget) if new[0] else new[1]
    if isinstance(old, dict) and old and isinstance(new, dict):
        budget.spend(len(old) + len(new))
        if not all(type(key) is str for key in chain(old, new)):
            raise FormatError("the pickle sets attributes whose names are no text")
        return {**old, **new}
    return new


# Tensors -------------------------------------------------------------------------------------------------------------


def _tensor(_: Global, args: tuple[Any, ...], budget: Budget) -> StoredTensor | UnsupportedTensor:
    """`_rebuild_tensor(storage, offset, size, strides)`; v2 adds (requires_grad, hooks[, metadata])."""
    storage, offset, size, strides, *rest = args
    if isinstance(storage, Storage) and storage.dtype is None:
        raise TypeError("an untyped storage without a dtype")
    dtype = storage.dtype if isinstance(storage, Storage) else _foreign_storage(storage)
    return _view(storage, dtype, offset, size, strides, rest[2] if len(rest) > 2 else None)


def _tensor_v3(_: Global, args: tuple[Any, ...], budget: Budget) -> StoredTensor | UnsupportedTensor:
    """`_rebuild_tensor_v3(untyped storage, offset, size, strides, requires_grad, hooks, dtype[, metadata])`."""
    storage, offset, size, strides, _grad, _hooks, dtype, *rest = args
    return _view(storage, dtype, offset, size, strides, rest[0] if rest else None)


def _foreign_storage(storage: Any) -> Global:
    """The class of a storage whose type we do not hold."""
    if not isinstance(storage, Opaque) or storage.cls.name not in OTHER_ITEM_SIZES:
        raise TypeError("not a storage")
    return storage.cls


def _view(
    storage: Any, dtype: Any, offset: Any, size: Any, strides: Any, metadata: Any
) -> StoredTensor | UnsupportedTensor:
    """A strided view of a storage; offset and strides in elements. FormatError where it reaches out of the storage."""
    shape = _shape(size)
    steps = _counts(strides)
    if len(shape) != len(steps) or type(offset) is not int or offset < 0:
        raise FormatError(f"a tensor of shape {shape} has strides {steps} and offset {offset}")
    if not isinstance(dtype, DType):
        return UnsupportedTensor(f"has elements of type {_foreign_type(dtype)}, which safetensors cannot hold", shape)
    flags = [str(key) for key, value in metadata.items() if value] if metadata else []
    if flags:
        return UnsupportedTensor(f"is a lazy view ({', '.join(flags)}) whose bytes are not its values", shape)
    if not isinstance(storage, Storage):
        raise TypeError("not a storage")
    if storage.dtype not in (dtype, None):
        raise FormatError(f"a {dtype} tensor lies on storage {storage.key} of {storage.dtype}")
    last = offset + sum([(count - 1) * step for count, step in zip(shape, steps, strict=True)])
    if 0 not in shape and (last + 1) * dtype.itemsize > storage.nbytes:
        raise FormatError(
            f"a {dtype} tensor of shape {shape} with strides {steps} at element {offset} reaches out of storage "
            f"{storage.key} of {storage.nbytes} bytes"
        )
    return StoredTensor(storage, dtype, shape, steps, offset)


def _foreign_type(dtype: Any) -> str:
    if not isinstance(dtype, Global):
        raise TypeError("not a dtype")
    return dtype.path


def _shape(size: Any) -> tuple[int, ...]:
    """A shape whose elements can be counted in 63 bits."""
    shape = _counts(size)
    if prod([max(count, 1) for count in shape]) > LARGEST_COUNT:
        raise FormatError(f"a tensor of shape {shape} has too many elements")
    return shape


def _counts(values: Any) -> tuple[int, ...]:
    """Sizes or strides: a short tuple or list of integers that are not negative."""
    if not isinstance(values, (tuple, list)) or len(values) > DEFAULT_LIMITS.dimensions:
        raise TypeError("not a shape")
    for value in values:
        if type(value) is not int or not 0 <= value <= LARGEST_COUNT:
            raise FormatError(f"a tensor has a size or stride that is no count: {_show(value)}")
    return tuple(values)


def _show(value: Any) -> str:
    return str(value)[:40] if isinstance(value, (int, float, str)) else type(value).__name__


def _parameter(_: Global, args: tuple[Any, ...], budget: Budget) -> Any:
    """`_rebuild_parameter(tensor, requires_grad, hooks)`; the variant with state adds the attributes."""
    tensor, _grad, _hooks, *rest = args
    if rest and isinstance(tensor, StoredTensor):
        state = merge_states(tensor.attributes, rest[0], budget)
        return replace(tensor, attributes=state if isinstance(state, dict) else {})
    return tensor


def _wrapper_subclass(_: Global, args: tuple[Any, ...], budget: Budget) -> WrapperSubclass:
    """`_rebuild_wrapper_subclass(class, dtype, size, strides, storage offset, layout, device, requires_grad)`."""
    cls, dtype, size, *_rest = args
    if not isinstance(cls, Global):
        raise TypeError("not a class")
    return WrapperSubclass(cls, dtype if isinstance(dtype, DType) else None, _shape(size))


def _from_type(_: Global, args: tuple[Any, ...], budget: Budget) -> Any:
    """`_rebuild_from_type_v2(function, class, args, state)`: a tensor of a subclass, with its state."""
    function, cls, inner_args, state = args
    if not isinstance(cls, Global) or not isinstance(function, Global) or not isinstance(inner_args, tuple):
        raise TypeError("not a class and a call")
    reducer = INNER_REDUCERS.get(function.path)
    if reducer is None:
        return UnsupportedTensor(f"is a {cls.path}, made by {function.path}, which we do not read")
    tensor = reducer(function, inner_args, budget)
    if isinstance(tensor, WrapperSubclass):
        tensor.cls = cls
        tensor.state = merge_states(tensor.state, state, budget)
    elif isinstance(tensor, StoredTensor):
        attributes = merge_states(tensor.attributes, state, budget)
        plain = cls.path in ("torch.Tensor", "torch.nn.parameter.Parameter")
        tensor = replace(
            tensor, attributes=attributes if isinstance(attributes, dict) else {}, cls=None if plain else cls
        )
    return tensor


def _from_cpu_tensor(_: Global, args: tuple[Any, ...], budget: Budget) -> Any:
    """`_rebuild_device_tensor_from_cpu_tensor(tensor, dtype, device, requires_grad)`."""
    tensor, dtype, *_rest = args
    if isinstance(tensor, StoredTensor) and tensor.dtype is not dtype:
        return UnsupportedTensor(f"was saved as {tensor.dtype} in place of another type", tensor.shape)
    return tensor


def _without_bytes(reason: str, size_at: int | None = None) -> Reducer:
    """A reducer of tensors whose elements are not the bytes of one storage."""

    def reduce(_: Global, args: tuple[Any, ...], budget: Budget) -> UnsupportedTensor:
        shape = None if size_at is None else _shape(args[size_at])
        return UnsupportedTensor(reason, shape)

    return reduce


# Plain values --------------------------------------------------------------------------------------------------------


def _size(_: Global, args: tuple[Any, ...], budget: Budget) -> tuple[Any, ...]:
    """`torch.Size(tuple)` is that tuple."""
    (size,) = args
    if not isinstance(size, tuple):
        raise TypeError("not a tuple")
    return size


def _mapping(function: Global, args: tuple[Any, ...], budget: Budget) -> Any:
    """An ordered or default dict is a dict: empty, or of the pairs that protocols 0 and 1 give it."""
    content = args[-1] if args else ()
    if isinstance(content, dict):
        content = content.items()
    elif not isinstance(content, (list, tuple)):
        content = ()
    budget.spend(len(content))
    if any(type(key) is not str or len(key) > DEFAULT_LIMITS.key_length for key, _ in content):
        return Opaque(function, args)
    return dict(content)


def _encode(function: Global, args: tuple[Any, ...], budget: Budget) -> Any:
    """`_codecs.encode(text, "latin1")` is how protocols below 3 write bytes."""
    if len(args) == 2 and isinstance(args[0], str) and args[1] in ("latin1", "latin-1"):
        budget.spend(len(args[0]) // 64)
        return args[0].encode("latin-1")
    return Opaque(function, args)


def _reconstructor(function: Global, args: tuple[Any, ...], budget: Budget) -> Opaque:
    """`copyreg._reconstructor(class, base, value)` is how protocols 0 and 1 make an instance."""
    cls = args[0]
    return Opaque(cls, args[1:]) if isinstance(cls, Global) else Opaque(function, args)


SCALARS = {"f2": "e", "f4": "f", "f8": "d", "b1": "?"}
SCALARS |= {"i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q"}


def _numpy_scalar(function: Global, args: tuple[Any, ...], budget: Budget) -> Any:
    """`numpy.…multiarray.scalar(dtype, bytes)` of a plain type is a Python number."""
    match args:
        case (Opaque(args=(str(kind), *_), state=(_, str(order), *_)), bytes(data)) if kind in SCALARS:
            return struct.unpack((">" if order == ">" else "<") + SCALARS[kind], data)[0]
    return Opaque(function, args)


INNER_REDUCERS: dict[str, Reducer] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_wrapper_subclass": _wrapper_subclass,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _from_cpu_tensor,
    "torch._utils._rebuild_meta_tensor_no_storage": _without_bytes("was on the meta device: it has no bytes", 1),
    "torch._utils._rebuild_qtensor": _without_bytes("is quantised", 2),
    "torch._utils._rebuild_sparse_tensor": _without_bytes("is sparse"),
    "torch._utils._rebuild_sparse_csr_tensor": _without_bytes("is sparse"),
    "torch._utils._rebuild_nested_tensor": _without_bytes("is nested"),
    "torch._utils._rebuild_device_tensor_from_numpy": _without_bytes("was saved as a numpy array"),
    "torch._utils._rebuild_xla_tensor": _without_bytes("was saved as a numpy array"),
}
"""Functions that make a tensor; those that another one (`_rebuild_from_type_v2`) may be given."""

REDUCERS: dict[str, Reducer] = {
    **INNER_REDUCERS,
    "torch._tensor._rebuild_from_type": _from_type,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.tensor._rebuild_from_type": _from_type,
    "torch.tensor._rebuild_from_type_v2": _from_type,
    "torch.Size": _size,
    "collections.OrderedDict": _mapping,
    "collections.defaultdict": _mapping,
    "builtins.dict": _mapping,
    "__builtin__.dict": _mapping,
    "_codecs.encode": _encode,
    "copyreg._reconstructor": _reconstructor,
    "copy_reg._reconstructor": _reconstructor,
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "numpy._core.multiarray.scalar": _numpy_scalar,
}
