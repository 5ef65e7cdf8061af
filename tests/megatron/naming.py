"""The names that megatron-core gives the same parameters: TransformerEngine's layer spec, three kinds of experts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Literal

import torch

Experts = Literal["sequential", "te_grouped", "grouped"]
"""SequentialMLP, TEGroupedMLP, and GroupedMLP, which went with megatron-core 0.16."""

EXPERT = re.compile(r"(.*\.experts)\.local_experts\.(\d+)\.(linear_fc[12](?:\.adapter(?:\.\w+)*)?)\.(weight|bias)")
LAYER = re.compile(r"((?:.*\.)?decoder\.layers\.)(\d+)(\..*)")


def te_name(name: str, known: Mapping[str, object]) -> str:
    """The name under TransformerEngine's spec, which fuses a norm into the projection behind it.

    Without such a projection (experts behind the norm, MLA's input norm) the name stays. `known` holds the local
    spec's names of the whole model.
    """
    for norm, projections in _FUSED.items():
        found = re.fullmatch(rf"(.*\.){re.escape(norm)}\.(weight|bias)", name)
        for projection in projections if found else ():
            if found and f"{found[1]}{projection}.weight" in known:
                return f"{found[1]}{projection}.layer_norm_{found[2]}"
    return name


_FUSED = {
    "input_layernorm": ("self_attention.linear_qkv", "self_attention.in_proj"),
    "pre_mlp_layernorm": ("mlp.linear_fc1",),
    "self_attention.q_layernorm": ("self_attention.linear_q_up_proj",),
    "self_attention.kv_layernorm": ("self_attention.linear_kv_up_proj",),
}


def local_experts(
    tensors: Mapping[str, torch.Tensor], *, ep: int, ep_rank: int, kind: Experts
) -> dict[str, torch.Tensor]:
    """The tensors that one expert-parallel rank holds, its experts numbered from 0 and named as `kind` names them."""
    kept: dict[str, torch.Tensor] = {}
    experts: dict[tuple[str, str, str], dict[int, torch.Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        found = EXPERT.fullmatch(name)
        if found is None:
            kept[name] = tensor
        else:
            experts[found[1], found[3], found[4]][int(found[2])] = tensor
    for (module, layer, parameter), by_number in experts.items():
        each = len(by_number) // ep
        mine = [by_number[number] for number in range(ep_rank * each, (ep_rank + 1) * each)]
        kept |= _name_experts(module, layer, parameter, mine, kind)
    return kept


def _name_experts(
    module: str, layer: str, parameter: str, experts: list[torch.Tensor], kind: Experts
) -> dict[str, torch.Tensor]:
    if kind == "sequential":
        return {f"{module}.local_experts.{n}.{layer}.{parameter}": expert for n, expert in enumerate(experts)}
    if ".adapter" in layer:
        return {f"{module}.{layer}.{parameter}": torch.stack(experts)}
    if kind == "te_grouped":
        return {f"{module}.{layer}.{parameter}{n}": expert for n, expert in enumerate(experts)}
    # GroupedMLP multiplies by the transposed matrices, kept one after the other in the memory of one 2-D parameter.
    memory = torch.stack([expert.T.contiguous() for expert in experts])
    if layer == "linear_fc1":
        return {f"{module}.weight1": memory.view(memory.shape[1], -1)}
    return {f"{module}.weight2": memory.view(-1, memory.shape[2])}
