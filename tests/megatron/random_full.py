"""Whole Megatron tensors of random values, in shapes that no two of which are alike, one block at a time."""

from __future__ import annotations

import torch

HIDDEN = 24
HEAD = 4
HEADS = 8
GROUPS = 4
FFN = 40
EXPERTS = 8
EXPERT_FFN = 16
VOCABULARY = 96

State = dict[str, torch.Tensor]


class Draw:
    """Draws tensors of one dtype."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)


def model(
    layers: int, *, experts: tuple[int, ...] = (), tied: bool = False, bias: bool = False, draw: Draw | None = None
) -> State:
    """A decoder of grouped-query attention; layers in `experts` have routed and shared experts, the others an MLP."""
    draw = draw or Draw()
    full: State = {"embedding.word_embeddings.weight": draw(VOCABULARY, HIDDEN)}
    for number in range(layers):
        layer = f"decoder.layers.{number}."
        full |= attention(draw, layer, bias=bias)
        full[f"{layer}pre_mlp_layernorm.weight"] = draw(HIDDEN)
        full |= mixture(draw, f"{layer}mlp.") if number in experts else mlp(draw, f"{layer}mlp.", FFN, bias=bias)
    full["decoder.final_layernorm.weight"] = draw(HIDDEN)
    if not tied:
        full["output_layer.weight"] = draw(VOCABULARY, HIDDEN)
    return full


def attention(draw: Draw, layer: str, *, bias: bool = False, groups: int = GROUPS) -> State:
    rows = (HEADS + 2 * groups) * HEAD
    module = f"{layer}self_attention."
    full = {
        f"{layer}input_layernorm.weight": draw(HIDDEN),
        f"{module}linear_qkv.weight": draw(rows, HIDDEN),
        f"{module}linear_proj.weight": draw(HIDDEN, HEADS * HEAD),
        f"{module}q_layernorm.weight": draw(HEAD),
        f"{module}k_layernorm.weight": draw(HEAD),
    }
    if bias:
        full |= {f"{module}linear_qkv.bias": draw(rows), f"{module}linear_proj.bias": draw(HIDDEN)}
    return full


def mlp(draw: Draw, module: str, width: int, *, bias: bool = False, gated: bool = True) -> State:
    rows = 2 * width if gated else width
    full = {f"{module}linear_fc1.weight": draw(rows, HIDDEN), f"{module}linear_fc2.weight": draw(HIDDEN, width)}
    if bias:
        full |= {f"{module}linear_fc1.bias": draw(rows), f"{module}linear_fc2.bias": draw(HIDDEN)}
    return full


def mixture(draw: Draw, module: str) -> State:
    full = {
        f"{module}router.weight": draw(EXPERTS, HIDDEN),
        f"{module}router.expert_bias": draw(EXPERTS).float(),
        f"{module}shared_experts.gate_weight": draw(1, HIDDEN),
    }
    for expert in range(EXPERTS):
        full |= mlp(draw, f"{module}experts.local_experts.{expert}.", EXPERT_FFN)
    return full | mlp(draw, f"{module}shared_experts.", 32)


def latent_attention(draw: Draw, layer: str) -> State:
    """MLA in TransformerEngine's way: the down projections are the same on all ranks."""
    module = f"{layer}self_attention."
    return {
        f"{module}linear_q_down_proj.weight": draw(12, HIDDEN),
        f"{module}linear_q_up_proj.weight": draw(HEADS * 6, 12),
        f"{module}linear_kv_down_proj.weight": draw(20 + 2, HIDDEN),
        f"{module}linear_kv_up_proj.weight": draw(HEADS * 8, 20),
        f"{module}q_layernorm.weight": draw(12),
        f"{module}kv_layernorm.weight": draw(20),
        f"{module}linear_proj.weight": draw(HIDDEN, HEADS * 4),
        f"{layer}input_layernorm.weight": draw(HIDDEN),
        f"{layer}pre_mlp_layernorm.weight": draw(HIDDEN),
    } | mlp(draw, f"{layer}mlp.", FFN)


def delta_net(draw: Draw, layer: str) -> State:
    """A gated delta net of 4 key heads and 8 value heads."""
    module, keys, values, heads = f"{layer}self_attention.", 16, 24, 8
    return {
        f"{module}in_proj.weight": draw(2 * keys + 2 * values + 2 * heads, HIDDEN),
        f"{module}conv1d.weight": draw(2 * keys + values, 1, 4),
        f"{module}A_log": draw(heads),
        f"{module}dt_bias": draw(heads),
        f"{module}out_norm.weight": draw(3),
        f"{module}out_proj.weight": draw(HIDDEN, values),
        f"{layer}input_layernorm.weight": draw(HIDDEN),
        f"{layer}pre_mlp_layernorm.weight": draw(HIDDEN),
    } | mlp(draw, f"{layer}mlp.", FFN)


def adapters(draw: Draw, layer: str, rank: int = 4) -> State:
    """Megatron-Bridge's LoRA beside attention and a gated MLP."""
    inner = {"linear_proj": HEADS * HEAD, "linear_fc2": FFN}
    outer = {"linear_qkv": (HEADS + 2 * GROUPS) * HEAD, "linear_fc1": 2 * FFN}
    full: State = {}
    for module, linears in (("self_attention", ("linear_qkv", "linear_proj")), ("mlp", ("linear_fc1", "linear_fc2"))):
        for linear in linears:
            base = f"{layer}{module}.{linear}.adapter"
            full[f"{base}.linear_in.weight"] = draw(rank, inner.get(linear, HIDDEN))
            full[f"{base}.linear_out.weight"] = draw(outer.get(linear, HIDDEN), rank)
    return full
