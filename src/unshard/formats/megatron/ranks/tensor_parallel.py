"""How tensor parallelism cuts parameters: which names along which axis, and with which sections.

Sources: megatron-core's ColumnParallelLinear (axis 0), RowParallelLinear (axis 1, bias replicated) and
VocabParallelEmbedding (axis 0) in `tensor_parallel/layers.py`, and the modules that use them:
`transformer/attention.py`, `mlp.py`, `multi_latent_attention.py`, `multi_token_prediction.py`, `moe/`,
`ssm/gated_delta_net.py` and `mamba_mixer.py`, `models/vision/`; Megatron-Bridge `peft/utils.py` for adapters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from unshard.checkpoint import Shape
from unshard.formats.megatron.sections import (
    delta_net_convolution_sizes,
    delta_net_sizes,
    mamba_convolution_sizes,
    mamba_sizes,
)


@dataclass(frozen=True, slots=True)
class Cut:
    """How the shards of one tensor lie: along `axis` (None: each rank has all of it), in sections of these sizes.

    `sections` are the sizes in one shard; empty where the whole shard is one.
    """

    axis: int | None
    sections: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.axis is None:
            return "replicated"
        return f"axis {self.axis}" + (f" in {len(self.sections)} sections" if self.sections else "")


@dataclass(frozen=True, slots=True)
class Neighbours:
    """What tells of a shard beside its name.

    shapes:     name → shape of all shards of the same rank and stage.
    facts:      what training recorded.
    vocabulary: rows of the embedding's shard, on whichever stage it lies; None where there is none.
    """

    shapes: Mapping[str, Shape]
    facts: Mapping[str, Any]
    vocabulary: int | None = None


Teller: TypeAlias = Callable[[str, Shape, Neighbours], "Cut | None"]
"""From name, shape and neighbours of a shard; None where they do not tell."""

COLUMNS, ROWS, REPLICATED = Cut(0), Cut(1), Cut(None)


def cut_of(name: str, shape: Shape, near: Neighbours) -> Cut | None:
    """How a tensor is cut, by the first entry of the table that knows its name; None where nothing tells."""
    if _is_huggingface_tower(name, near.shapes):
        return REPLICATED
    for pattern, entry in _TABLE:
        if pattern.fullmatch(name):
            return entry if isinstance(entry, Cut) else entry(name, shape, near)
    return None


def _is_huggingface_tower(name: str, names: Mapping[str, Shape]) -> bool:
    """Whether a tensor belongs to a vision tower of transformers, whole on each rank, as Megatron-Bridge has some."""
    tower = re.match(r"(?:.*\.)?(?:visual|vision_model|vision_tower)\.", name)
    own = ("blocks.", "embeddings.")
    return tower is not None and any(other.startswith(tuple([tower[0] + part for part in own])) for other in names)


def _first_layer(name: str, shape: Shape, near: Neighbours) -> Cut | None:
    """`linear_fc1`: gate and up where it has twice as many rows as `linear_fc2` has columns."""
    second = _matrix(near, re.sub(r"linear_fc1\.(weight|bias)", "linear_fc2.weight", name))
    return _gated_or_plain(shape, second, near)


def _adapter_out(name: str, shape: Shape, near: Neighbours) -> Cut | None:
    """`linear_out` of an adapter: cut by rows whatever its base is, with the sections of the base."""
    base, _, _ = name.rpartition(".adapter.")
    if base.endswith("linear_fc1") and ".adapter.adapter_" not in name:
        module = base.removesuffix("linear_fc1")
        second = _matrix(near, f"{module}linear_fc2.weight")
        second = second or _matrix(near, f"{module}linear_fc2.adapter.linear_in.weight")
        return _gated_or_plain(shape, second, near)
    return _sections(f"{base}.weight", shape, near) if base.endswith("in_proj") else COLUMNS


def _gated_or_plain(shape: Shape, second: Shape | None, near: Neighbours) -> Cut | None:
    rows = (*shape, 0)[0]
    if second is not None:
        gated = rows == 2 * second[1]
    elif isinstance(near.facts.get("gated_linear_unit", near.facts.get("swiglu")), bool):
        gated = near.facts.get("gated_linear_unit", near.facts.get("swiglu"))
    else:
        return None
    return Cut(0, (rows // 2, rows - rows // 2)) if gated else COLUMNS


def _adapter_in(name: str, shape: Shape, near: Neighbours) -> Cut | None:
    """`linear_in` of an adapter: by columns where its base is cut by columns, else by rows, which are LoRA's rank."""
    return ROWS if _is_row_parallel(name) else COLUMNS


def _sections(name: str, shape: Shape, near: Neighbours) -> Cut | None:
    """`in_proj` and `conv1d` of gated delta nets and Mamba mixers; sizes are told by the tensors beside them."""
    module, kind = name.rsplit(".", 2)[:2]
    heads, output = near.shapes.get(f"{module}.A_log"), _matrix(near, f"{module}.out_proj.weight")
    if not shape or not heads or output is None:
        return None
    delta = not module.endswith("mixer")
    try:
        if kind == "conv1d":
            sizes = (delta_net_convolution_sizes if delta else mamba_convolution_sizes)(shape[0], output[1])
        else:
            sizes = (delta_net_sizes if delta else mamba_sizes)(shape[0], output[1], heads[0])
    except ValueError:
        return None
    return Cut(0, sizes)


def _down_projection(name: str, shape: Shape, near: Neighbours) -> Cut | None:
    """MLA's down projections: replicated by TransformerEngine's `duplicated` mode, cut by rows in the local spec.

    The up projection has as many columns as the latent is wide, so that a whole query projection has as many rows, and
    a whole key-value projection more (the rotary part). With a rotary part wider than the latent, only args tell.
    """
    up = _matrix(near, name.replace("_down_", "_up_"))
    facts, rows = near.facts, (*shape, 0)[0]
    query, latent, rotary = (facts.get(fact) for fact in ("q_lora_rank", "kv_lora_rank", "qk_pos_emb_head_dim"))
    if "linear_qkv_down" in name:
        known = [part for part in (query, latent, rotary) if type(part) is int]
        whole = sum(known) if len(known) == 3 else None
    elif "linear_q_down" in name:
        whole = up[1] if up else query
    else:
        whole = latent + rotary if type(latent) is int and type(rotary) is int else None
        if whole is None and up is not None:
            return COLUMNS if rows <= up[1] else REPLICATED
    if type(whole) is not int:
        return None
    return REPLICATED if rows == whole else COLUMNS


def _matrix(near: Neighbours, name: str) -> Shape | None:
    """The shape of a neighbour that is a matrix."""
    shape = near.shapes.get(name)
    return shape if shape is not None and len(shape) == 2 else None


def _head_norm(name: str, shape: Shape, near: Neighbours) -> Cut | None:
    """q/k norms: of one head, or of the whole projection, then replicated, or cut as the projection is.

    Both are as long where a rank has one head. Then the other norm tells: those of heads are equally long.
    """
    module, which, _ = name.rsplit(".", 2)
    projection, fused = (_matrix(near, f"{module}.{linear}.weight") for linear in ("linear_proj", "linear_qkv"))
    if projection is None or fused is None or not shape:
        return REPLICATED
    query = projection[1]
    rows = query if which.startswith("q") else (fused[0] - query) // 2
    other = near.shapes.get(f"{module}.{'k' if which.startswith('q') else 'q'}_layernorm.weight")
    if shape[0] != rows:
        return REPLICATED
    if other is not None and other != shape:
        return COLUMNS
    head = near.facts.get("kv_channels")
    if (
        head is None
        and type(near.facts.get("hidden_size")) is int
        and type(near.facts.get("num_attention_heads")) is int
    ):
        head = near.facts["hidden_size"] // max(near.facts["num_attention_heads"], 1)
    if head is None:
        return REPLICATED if other == shape else COLUMNS
    return REPLICATED if shape[0] == head else COLUMNS


def _output(name: str, shape: Shape, near: Neighbours) -> Cut | None:
    """`output_layer`: cut like the embedding where it is one of the vocabulary; a value head is replicated."""
    rows = (*shape, 0)[0]
    padded, ranks = near.facts.get("padded_vocab_size"), near.facts.get("tensor_model_parallel_size")
    if near.vocabulary is not None:
        return COLUMNS if rows == near.vocabulary else REPLICATED
    if type(padded) is int and type(ranks) is int:
        return COLUMNS if rows * ranks == padded else REPLICATED
    return REPLICATED if rows == 1 else COLUMNS


def _adapter_magnitude(name: str, shape: Shape, near: Neighbours) -> Cut | None:
    """`weight_magnitude` of DoRA: cut as the rows of the base are."""
    return REPLICATED if _is_row_parallel(name) else _adapter_out(name, shape, near)


def _is_row_parallel(name: str) -> bool:
    """Whether an adapter's base is cut by columns."""
    return name.rpartition(".adapter.")[0].endswith(("linear_proj", "linear_fc2", "out_proj"))


_PREFIX = r"(?:.*\.)?"
_ENTRIES: tuple[tuple[str, Cut | Teller], ...] = (
    (r"adapter\.(?:adapter_\w+\.)?linear_in\.weight", _adapter_in),
    (r"adapter\.(?:adapter_\w+\.)?linear_out\.weight", _adapter_out),
    (r"adapter\.weight_magnitude", _adapter_magnitude),
    (r"word_embeddings\.weight", COLUMNS),
    (r"output_layer\.(?:weight|bias)", _output),
    (r"linear_(?:qkv|q|k|v|kv|q_proj|q_up_proj|kv_up_proj)\.(?:weight|bias)", COLUMNS),
    (r"linear_(?:q|kv|qkv)_down_proj\.weight", _down_projection),
    (r"linear_fc1\.(?:weight|bias)", _first_layer),
    (r"(?:linear_proj|linear_fc2|out_proj)\.weight", ROWS),
    (r"(?:linear_proj|linear_fc2|out_proj)\.bias", REPLICATED),
    (r"(?:eh_proj|multi_modal_projector\.proj)\.(?:weight|bias)", COLUMNS),
    (r"softmax_offset", COLUMNS),
    (r"(?:in_proj|conv1d)\.(?:weight|bias)", _sections),
    (r"A_log|dt_bias|mixer\.D|mixer\.norm\.weight", COLUMNS),
    (r"self_attention\.[qk]_layernorm\.weight", _head_norm),
    (r"layer_norm_(?:weight|bias)", REPLICATED),
    (r"\w*(?:layernorm|norm|norm\d|ln_pre|ln_post|ln_q)\.(?:weight|bias)", REPLICATED),
    (r"router\.(?:weight|bias|expert_bias)", REPLICATED),
    (r"shared_experts\.gate_weight", REPLICATED),
    (r"(?:position_embeddings|pos_embed|tokentype_embeddings)\.weight", REPLICATED),
    (r"class_token|(?:conv1|patch_embed\.proj|embedder)\.(?:weight|bias)", REPLICATED),
    (r"indexer\.\w+\.(?:weight|bias)", REPLICATED),
)  # fmt: skip
"""End of a name → how it is cut, or what tells it."""
_TABLE = tuple([(re.compile(f"{_PREFIX}(?:{pattern})"), entry) for pattern, entry in _ENTRIES])
