"""What the unpickler builds: inert records, never live objects of the classes that a file names.

Records compare and hash by identity, and show no content in their repr: what a file nests may be deeper than Python's
own recursion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unshard.dtypes import DType
from unshard.tensors import SourceFile


@dataclass(frozen=True, slots=True)
class Storage:
    """The bytes of one storage in the file.

    `offset` is the byte at which the payload begins in `file`, `nbytes` its length. `dtype` is None for untyped
    storages. `numel` counts elements of `dtype` (bytes if untyped).
    """

    file: SourceFile
    key: str
    dtype: DType | None
    numel: int
    offset: int
    nbytes: int


@dataclass(slots=True, eq=False)
class StoredTensor:
    """A strided view of a storage: `offset` and `strides` in elements of `dtype`.

    `attributes` is what was put on a Parameter (`_rebuild_parameter_with_state`) or on a subclass, or empty. `cls` is
    the subclass of Tensor that was saved, None for Tensor and Parameter themselves.
    """

    storage: Storage
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    attributes: dict[str, Any] = field(default_factory=dict, repr=False)
    cls: Global | None = None


@dataclass(frozen=True, slots=True, eq=False)
class UnsupportedTensor:
    """A tensor that cannot be read as plain elements. `reason` completes "this tensor …"; unknown shapes are None."""

    reason: str
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function that the file names, `module.name`. It is never imported."""

    module: str
    name: str

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Opaque:
    """An instance of a class that we do not know, or the result of a call that we do not make.

    `cls` is the class or function, `args` (and `kwargs`) what it was called with, `state` what BUILD set (merged, when
    it is a dict; a `(dict, slots)` pair is merged too), `items` and `pairs` what APPENDS and SETITEMS added.
    """

    cls: Global
    args: tuple[Any, ...] = field(default=(), repr=False)
    kwargs: Mapping[str, Any] | None = field(default=None, repr=False)
    state: Any = field(default=None, repr=False)
    items: list[Any] | tuple[()] = field(default=(), repr=False)
    pairs: list[tuple[Any, Any]] | tuple[()] = field(default=(), repr=False)

    def get(self, attribute: str, default: Any = None) -> Any:
        """An attribute of the state, where the state is a dict."""
        return self.state.get(attribute, default) if isinstance(self.state, dict) else default


@dataclass(slots=True, eq=False)
class WrapperSubclass:
    """A tensor subclass without a storage of its own: DTensor, ShardedTensor.

    `cls` names it, `shape` is the global shape as the wrapper recorded it, `dtype` its dtype (None where we hold no
    such type), `state` what belongs to it (`_local_tensor` and `_spec`; the 5-tuple of a ShardedTensor).
    """

    cls: Global
    dtype: DType | None
    shape: tuple[int, ...]
    state: Any = field(default=None, repr=False)
