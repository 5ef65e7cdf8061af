"""What families compute: pure functions over numpy arrays, bound to their names in plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from unshard.run.functions import register

if TYPE_CHECKING:
    from unshard.dtypes import Array

SHIFT = "shift"


@register(SHIFT, footprint=8)
def add_constant(inputs: Sequence[Array], parameters: Mapping[str, object]) -> Array:
    """The only input plus `by`, in float32 (float64 for float64); the engine rounds once, at the end."""
    import numpy as np

    (values,) = inputs
    by = parameters["by"]
    if not isinstance(by, int | float):
        raise TypeError(f"{SHIFT}: `by` should be a number, but is {by!r}")
    shifted: Array = values.astype(np.float64 if values.dtype == np.float64 else np.float32)
    shifted += by
    return shifted
