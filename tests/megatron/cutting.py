"""How tensor parallelism cuts the parameters of megatron-core, in plain torch.

Written from megatron-core's own classes (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, `mlp.py`,
`gated_delta_net.py`) and Megatron-Bridge's `peft/utils.py`; it knows nothing of the package under test.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

Full = Mapping[str, torch.Tensor]
"""Whole Megatron tensors by their names in the local spec: global layers, one tensor per expert."""

COLUMNS = (
    "embedding.word_embeddings.weight",
    "output_layer.weight",
    "output_layer.bias",
    "linear_qkv.weight",
    "linear_qkv.bias",
    "linear_fc1.weight",
    "linear_fc1.bias",
    "linear_q_proj.weight",
    "linear_q_up_proj.weight",
    "linear_kv_up_proj.weight",
    "in_proj.weight",
    "conv1d.weight",
    "A_log",
    "dt_bias",
    "core_attention.softmax_offset",
    "eh_proj.weight",
)
"""Ends of the names that are cut along dimension 0."""

ROWS = ("linear_proj.weight", "linear_fc2.weight", "out_proj.weight")
"""Ends of the names that are cut along dimension 1."""


@dataclass(frozen=True)
class Cut:
    """The dimension that is cut, and the sizes of the sections that are each cut for themselves."""

    dim: int
    sections: tuple[int, ...]

    def piece(self, tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """What rank `rank` of `size` holds: its share of every section, one after the other."""
        return torch.cat([part for _, part in self.parts(tensor, rank, size)], self.dim)

    def parts(self, tensor: torch.Tensor, rank: int, size: int) -> list[tuple[int, torch.Tensor]]:
        """The shares of one rank, each with where it begins in the whole."""
        found = []
        start = 0
        for section in self.sections:
            if section % size:
                raise ValueError(f"a section of {section} rows cannot be shared by {size} ranks")
            share = section // size
            begin = start + rank * share
            found.append((begin, tensor.narrow(self.dim, begin, share)))
            start += section
        return found


def cut_of(name: str, full: Full, dims: Mapping[str, int] | None = None) -> Cut | None:
    """How the named tensor is cut; None: every rank holds the whole.

    `dims` gives the dimension for ends of names that this table lacks (q/k norms over the whole projection).
    """
    tensor = full[name]
    dim = _dim(name, dims or {})
    if dim is None or (name.endswith("output_layer.weight") and len(tensor) == 1):  # a value head is replicated
        return None
    if name.startswith("visual."):  # a tower kept as it runs in transformers is replicated
        return None
    return Cut(dim, sections_of(name, full) if dim == 0 else (tensor.shape[dim],))


def _dim(name: str, dims: Mapping[str, int]) -> int | None:
    if name.startswith("vision_tower."):  # a module of transformers
        return None
    for end, dim in dims.items():
        if name.endswith(end):
            return dim
    if ".adapter." in name:
        by_columns = (name.partition(".adapter.")[0] + ".weight").endswith(ROWS)
        if name.endswith(".weight_magnitude"):
            return None if by_columns else 0
        return 1 if by_columns and name.endswith(".linear_in.weight") else 0
    if name.endswith(COLUMNS):
        return 0
    return 1 if name.endswith(ROWS) else None


def sections_of(name: str, full: Full) -> tuple[int, ...]:
    """The sections along dimension 0: gate and up of a gated MLP, the parts of a gated delta net's projections."""
    rows = full[name].shape[0]
    if is_gated(name, full):
        return rows // 2, rows // 2
    if found := re.fullmatch(r"(.*)\.(in_proj|conv1d)(\.adapter\.linear_out)?\.weight", name):
        key, value, heads = delta_net_sizes(found[1], full)
        return (key, key, value, value, heads, heads) if "in_proj" in name else (key, key, value)
    return (rows,)


def is_gated(name: str, full: Full) -> bool:
    """Whether the tensor is the first layer of a gated MLP: it has twice as many rows as the second has columns."""
    found = re.fullmatch(r"(.*\.)linear_fc1(\.adapter\.linear_out)?\.(weight|bias|adapter\.weight_magnitude)", name)
    if found is None:
        return False
    second = [f"{found[1]}linear_fc2.weight", f"{found[1]}linear_fc2.adapter.linear_in.weight"]
    return full[name].shape[0] == 2 * next(full[other] for other in second if other in full).shape[1]


def delta_net_sizes(module: str, full: Full) -> tuple[int, int, int]:
    """Rows of queries (as many as of keys), rows of values, number of value heads of a gated delta net."""
    value = full[f"{module}.out_proj.weight"].shape[1]
    return (full[f"{module}.conv1d.weight"].shape[0] - value) // 2, value, full[f"{module}.A_log"].shape[0]


def pad_vocabulary(full: Full, rows: int | None) -> dict[str, torch.Tensor]:
    """The tensors with the embeddings lengthened to `rows` rows; the new ones hold noise, as after training."""
    padded = dict(full)
    for name, tensor in full.items():
        if rows and re.search(r"(^|\.)(embedding\.word_embeddings|output_layer)\.weight$", name) and len(tensor) > 1:
            generator = torch.Generator().manual_seed(rows)
            noise = torch.randn(rows - len(tensor), tensor.shape[1], generator=generator)
            padded[name] = torch.cat([tensor, noise.to(tensor.dtype)])
    return padded
