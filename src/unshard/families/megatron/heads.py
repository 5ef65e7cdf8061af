"""Value and reward heads, which take the place of the output layer and keep its name.

verl and Megatron-Bridge put a linear layer to one number there, whole on every rank (NVIDIA-NeMo/Megatron-Bridge,
`src/megatron/bridge/models/common/heads.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from unshard.tensors import Value

_OUTPUT, _EMBEDDING, _SCORE = "output_layer.", "embedding.word_embeddings.weight", "score."


def find_value_head(tensors: Mapping[str, Value]) -> Mapping[str, str]:
    """Stored name → name in the tables of families, of a head that is no language model's.

    An output layer has as many rows as the embedding, both with the same padding; a value head has fewer.
    """
    for name, weight in tensors.items():
        stem, _, rest = name.rpartition(_OUTPUT)
        embedding = tensors.get(stem + _EMBEDDING)
        if rest == "weight" and embedding is not None and weight.shape[:1] < embedding.shape[:1]:
            return {f"{stem}{_OUTPUT}{kind}": f"{stem}{_SCORE}{kind}" for kind in ("weight", "bias")}
    return {}
