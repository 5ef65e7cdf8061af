"""The element types that safetensors can hold, and what numpy and PyTorch call them.

Names are those of the safetensors header (huggingface/safetensors, `safetensors/src/tensor.rs`, enum `Dtype`).
numpy is loaded on first use only: the catalog and the plan need no arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    `itemsize` is in bytes. `packed` is the number of elements that safetensors counts in one item: 2 for `F4`, whose
    items are bytes with two elements each (torch's `float4_e2m1fn_x2`); shapes inside unshard count items, so the last
    dimension of an `F4` tensor is multiplied by `packed` in a safetensors header. `rank` orders the types in a
    safetensors file: wider first, which keeps every tensor aligned.
    """

    name: str
    itemsize: int
    rank: int
    torch_name: str
    numpy_name: str
    is_float: bool = False
    packed: int = 1

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The numpy dtype; the small floats come from ml_dtypes."""
        return _numpy_dtype(self)

    def holds(self, other: DType) -> bool:
        """Whether each value of another floating-point type is one of this: F32 holds F16 and BF16, which differ."""
        return self == other or (self.is_float and other.is_float and self.itemsize >= max(4, 2 * other.itemsize))

    def __repr__(self) -> str:
        return f"DType({self.name})"

    def __str__(self) -> str:
        return self.name


@cache
def _numpy_dtype(dtype: DType) -> np.dtype[np.generic]:
    import numpy as np

    if hasattr(np, dtype.numpy_name):
        return np.dtype(dtype.numpy_name)
    import ml_dtypes

    small: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, dtype.numpy_name))
    return small


BOOL = DType("BOOL", 1, 0, "bool", "bool_")
F4 = DType("F4", 1, 1, "float4_e2m1fn_x2", "uint8", packed=2)
U8 = DType("U8", 1, 4, "uint8", "uint8")
I8 = DType("I8", 1, 5, "int8", "int8")
F8_E5M2 = DType("F8_E5M2", 1, 6, "float8_e5m2", "float8_e5m2", is_float=True)
F8_E4M3 = DType("F8_E4M3", 1, 7, "float8_e4m3fn", "float8_e4m3fn", is_float=True)
F8_E8M0 = DType("F8_E8M0", 1, 8, "float8_e8m0fnu", "float8_e8m0fnu")
F8_E4M3FNUZ = DType("F8_E4M3FNUZ", 1, 9, "float8_e4m3fnuz", "float8_e4m3fnuz", is_float=True)
F8_E5M2FNUZ = DType("F8_E5M2FNUZ", 1, 10, "float8_e5m2fnuz", "float8_e5m2fnuz", is_float=True)
I16 = DType("I16", 2, 11, "int16", "int16")
U16 = DType("U16", 2, 12, "uint16", "uint16")
F16 = DType("F16", 2, 13, "float16", "float16", is_float=True)
BF16 = DType("BF16", 2, 14, "bfloat16", "bfloat16", is_float=True)
I32 = DType("I32", 4, 15, "int32", "int32")
U32 = DType("U32", 4, 16, "uint32", "uint32")
F32 = DType("F32", 4, 17, "float32", "float32", is_float=True)
C64 = DType("C64", 8, 18, "complex64", "complex64")
F64 = DType("F64", 8, 19, "float64", "float64", is_float=True)
I64 = DType("I64", 8, 20, "int64", "int64")
U64 = DType("U64", 8, 21, "uint64", "uint64")

DTYPES: tuple[DType, ...] = (
    BOOL, F4, U8, I8, F8_E5M2, F8_E4M3, F8_E8M0, F8_E4M3FNUZ, F8_E5M2FNUZ, I16, U16, F16, BF16, I32, U32, F32, C64,
    F64, I64, U64,
)  # fmt: skip

BY_NAME: dict[str, DType] = {dtype.name: dtype for dtype in DTYPES}
BY_TORCH_NAME: dict[str, DType] = {dtype.torch_name: dtype for dtype in DTYPES}

CAST_CHOICES: dict[str, DType] = {"bf16": BF16, "fp16": F16, "fp32": F32}
"""What `--dtype` accepts besides `keep`."""
