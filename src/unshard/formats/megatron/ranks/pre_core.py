"""Models from before megatron-core: their key tree, and the rows of their fused QKV.

The tree is `language_model: {embedding: {word_embeddings: …}, encoder: {'layers.0.…': …}, output_layer: …}`, with
`transformer` for `encoder` and `attention` for `self_attention` at first. Sources: Megatron-LM v1.0 to core_v0.8.0,
`megatron/model/language_model.py` (`load_state_dict`, which reads the older names too), `…/transformer.py`, and
`fix_query_key_value_ordering` in `checkpointing.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from unshard.errors import FormatError
from unshard.tensors import Tensor

_OF_TREE = re.compile(r"(language_model\.)?(encoder|transformer)\.layers\.\d+\.(self_)?attention\..*")
_RENAMED: tuple[tuple[str, str], ...] = (
    (r"(?:language_model\.)?(?:encoder|transformer)\.(layers\.\d+\..*)", r"decoder.\1"),
    (r"(?:language_model\.)?(?:encoder|transformer)\.final_(?:layer)?norm\.(.*)", r"decoder.final_layernorm.\1"),
    (r"language_model\.(?:embedding\.)?((?:word|position)_embeddings\..*)", r"embedding.\1"),
    (r"(?:language_model\.)?(?:output_layer|lm_head)\.(weight|bias)", r"output_layer.\1"),
    (r"word_embeddings_for_head\.(.*)", r"output_layer.\1"),
    (r"(decoder\.layers\.\d+)\.attention\.(.*)", r"\1.self_attention.\2"),
    (r"(.*\.self_attention)\.query_key_value\.(.*)", r"\1.linear_qkv.\2"),
    (r"(.*\.self_attention)\.dense\.(.*)", r"\1.linear_proj.\2"),
    (r"(.*)\.input_norm\.(.*)", r"\1.input_layernorm.\2"),
    (r"(decoder\.layers\.\d+)\.post_attention_(?:layer)?norm\.(.*)", r"\1.pre_mlp_layernorm.\2"),
    (r"(.*\.mlp)\.(local_experts\..*)", r"\1.experts.\2"),
    (r"(.*)\.dense_h_to_4h\.(.*)", r"\1.linear_fc1.\2"),
    (r"(.*)\.dense_4h_to_h\.(.*)", r"\1.linear_fc2.\2"),
)
"""Applied one after the other, each to what the ones before made of a name."""
_COMPILED = tuple([(re.compile(pattern), name) for pattern, name in _RENAMED])
_FUSED = re.compile(r".*\.self_attention\.linear_qkv\.(weight|bias)")


def is_pre_core(names: Iterable[str]) -> bool:
    """Whether these are the names of a model from before megatron-core. Those of an embedding alone do not tell."""
    return any(_OF_TREE.fullmatch(name) for name in names)


def core_name(name: str) -> str:
    """The name that megatron-core gives the same parameter."""
    for pattern, new in _COMPILED:
        match = pattern.fullmatch(name)
        if match is not None:
            name = match.expand(new)
    return name


def to_core(model: Mapping[str, Tensor], version: float, facts: Mapping[str, Any], ranks: int) -> dict[str, Tensor]:
    """A stage under megatron-core's names and layouts. Raises FormatError for rows of QKV that cannot be told apart.

    ranks: how many tensor-parallel ones there are. Rows of QKV are [3, heads, size] in version 0, [heads, size, 3] in
    1.0, and [heads, 3, size] from 2.0 on, which is megatron-core's grouped layout.
    """
    _refuse_forks(facts)
    core = {}
    for stored, tensor in model.items():
        name = core_name(stored)
        core[name] = (_order_rows(tensor, version, facts, ranks) if _FUSED.fullmatch(name) else tensor).rename(name)
    return core


def _order_rows(tensor: Tensor, version: float, facts: Mapping[str, Any], ranks: int) -> Tensor:
    """The shard of QKV of one tensor-parallel rank as [heads, 3, size]."""
    if version >= 2.0:
        return tensor
    if version not in (0.0, 1.0):
        raise FormatError(f"checkpoint_version {version:g} is none that Megatron-LM ever wrote")
    heads = facts.get("num_attention_heads")
    if not isinstance(heads, int):
        raise FormatError(
            f"checkpoint_version {version:g} keeps the rows of QKV by heads, and neither args nor a config.json say "
            "how many heads there are",
            hint="say it with --num-attention-heads N, or give the config.json of the model with --config DIR",
        )
    rows, rest = (*tensor.shape, 0)[0], tensor.shape[1:]
    local, uneven = divmod(heads, ranks)
    if not tensor.shape or uneven or not local or rows % (3 * local):
        raise FormatError(
            f"`{tensor.name}` has {rows} rows per rank, which are no query, key and value of {heads} heads on {ranks} "
            "tensor-parallel ranks",
            hint="are these the heads of this model? see args, --num-attention-heads and --config",
        )
    size = rows // 3 // local
    if version == 0.0:
        ordered = tensor.reshape((3, local, size, *rest)).transpose((1, 0, 2, *range(3, 3 + len(rest))))
    else:
        ordered = tensor.reshape((local, size, 3, *rest)).transpose((0, 2, 1, *range(3, 3 + len(rest))))
    return ordered.reshape(tensor.shape)


def _refuse_forks(facts: Mapping[str, Any]) -> None:
    """Raise FormatError for epfLLM's Megatron-LLM, whose MLP keeps [up; gate], and whose heads are interleaved.

    Its arguments are known by `tie_embed_logits` (epfLLM/Megatron-LLM, `megatron/arguments.py`).
    """
    if "tie_embed_logits" in facts:
        raise FormatError(
            "args have `tie_embed_logits`: this is a checkpoint of epfLLM's Megatron-LLM, which keeps other layouts "
            "under the same names",
            hint="convert it with that project's weights_conversion/megatron_to_hf.py",
        )
