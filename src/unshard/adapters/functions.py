"""How an adapter is fused into base weights: pure functions over numpy arrays, bound to their names in plans.

float32 arithmetic, float64 for float64 weights; the engine rounds once, at the end. Products are summed in the order of
the rank, not by BLAS: the bits of a row do not depend on how many rows are computed together, nor on threads, so that a
verification by another path finds the same bits. Against `merge_and_unload` only the order of that sum differs.

For a linear layer of weight [out, in], `left` is B [out, r] and `right` is A [r, in]; where the weight lies as
[in, out] (embeddings, GPT-2's Conv1D) they are Aᵀ and Bᵀ; packs of experts have one more axis in front.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from unshard.run.functions import register

if TYPE_CHECKING:
    from unshard.dtypes import Array

LORA, DORA, LORA_BIAS = "lora", "dora", "lora_bias"


@register(LORA)
def add_low_rank(inputs: Sequence[Array], parameters: Mapping[str, object]) -> Array:
    """The weight + scaling · left @ right. A convolution's weight has more axes than the product."""
    weight, left, right = inputs
    import numpy as np

    accumulator = np.float64 if weight.dtype == np.float64 else np.float32
    left, right = np.ascontiguousarray(left, accumulator), np.ascontiguousarray(right, accumulator)
    fused: Array = np.einsum("...mr,...rn->...mn", left, right, optimize=False)
    fused *= _scaling(parameters)
    fused = fused.reshape(weight.shape)
    fused += weight.astype(accumulator, copy=False)
    return fused


@register(DORA, footprint=24)
def add_and_normalize(inputs: Sequence[Array], parameters: Mapping[str, object]) -> Array:
    """DoRA: magnitude · V / ‖V‖ with V = weight + scaling · left @ right; the norm runs over the input features.

    magnitude: one per output feature. `parameters["outputs"]` is the axis of the weight that counts output features: 0,
    or 1 where the weight is transposed; then the weight must come whole.
    """
    *low_rank, magnitude = inputs
    import numpy as np

    fused = add_low_rank(low_rank, parameters)
    shape = fused.shape
    outputs = 1 if parameters["outputs"] == 1 else 0
    rows = fused.reshape(shape[0], -1) if outputs == 0 else fused
    norms = np.sqrt(np.square(rows).sum(axis=1 - outputs))
    factors = magnitude.astype(rows.dtype) / norms
    rows *= factors[:, None] if outputs == 0 else factors[None, :]
    return rows.reshape(shape)


@register(LORA_BIAS)
def add_bias(inputs: Sequence[Array], parameters: Mapping[str, object]) -> Array:
    """The bias + scaling · the bias of lora_B, both [out]."""
    bias, added = inputs
    import numpy as np

    accumulator = np.float64 if bias.dtype == np.float64 else np.float32
    fused: Array = np.multiply(added.astype(accumulator), _scaling(parameters))
    fused += bias.astype(accumulator, copy=False)
    return fused


def _scaling(parameters: Mapping[str, object]) -> float:
    scaling = parameters["scaling"]
    if not isinstance(scaling, (int, float)):
        raise TypeError(f"scaling is no number: {scaling!r}")
    return float(scaling)
