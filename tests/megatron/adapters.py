"""Low-rank adapters as Megatron-Bridge trains them beside whole Megatron tensors, and what they do, in plain torch.

Written from Megatron-Bridge's `peft/lora.py`, `canonical_lora.py`, `dora_layers.py` and `utils.py` alone. An adapter of
one expert bears the expert's own name, `….local_experts.{global}.linear_fc1.adapter.linear_in.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import torch

from megatron.cutting import Full

State = dict[str, torch.Tensor]

LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""What Megatron-Bridge's LoRA adapts by default."""
RANK = 4


def lora(full: Full, linears: Iterable[str] = LINEARS, *, rank: int = RANK, seed: int = 5) -> State:
    """An adapter for each matrix of these linear layers; both its matrices are random."""
    draw = _Draw(seed)
    found: State = {}
    for name in _adapted(full, linears):
        rows, columns = full[name].shape
        found |= _pair(f"{name.removesuffix('.weight')}.adapter", rows, columns, rank, draw, full[name].dtype)
    return found


def canonical(full: Full, parts: Iterable[str], *, groups: int, head: int, rank: int = RANK, seed: int = 6) -> State:
    """Adapters of `linear_qkv` for parts q, k and v, of `linear_fc1` for gate and up, by their names there."""
    draw = _Draw(seed)
    found: State = {}
    for name in _adapted(full, ("linear_qkv", "linear_fc1")):
        rows, columns = full[name].shape
        keys = groups * head
        sizes = {"q": rows - 2 * keys, "k": keys, "v": keys} if "linear_qkv" in name else dict.fromkeys(
            ("gate", "up"), rows // 2
        )  # fmt: skip
        for part in sizes.keys() & set(parts):
            at = f"{name.removesuffix('.weight')}.adapter.adapter_{part}"
            found |= _pair(at, sizes[part], columns, rank, draw, full[name].dtype)
    return dict(sorted(found.items()))


def dora(full: Full, linears: Iterable[str], *, seed: int = 7) -> State:
    """LoRA with a magnitude for each row of the base."""
    draw = _Draw(seed)
    found = lora(full, linears, seed=seed)
    for name in _adapted(full, linears):
        at = f"{name.removesuffix('.weight')}.adapter.weight_magnitude"
        found[at] = (draw(len(full[name])).abs() + 0.5).to(full[name].dtype)
    return found


def add_adapters(full: Full, adapters: Full, alpha: float, *, groups: int = 0) -> State:
    """The tensors with their adapters in them, computed in float64: W + alpha / r · B A, normalised by rows for DoRA.

    groups: of queries, for canonical LoRA, whose parts of `linear_qkv` are put together group by group.
    """
    merged: State = dict(full)
    for name, weight in full.items():
        at = f"{name.removesuffix('.weight')}.adapter"
        delta = _product(adapters, at, alpha)
        if delta is None:
            delta = _product_of_parts(adapters, at, alpha, weight, groups)
        if delta is None:
            continue
        changed = weight.double() + delta
        magnitude = adapters.get(f"{at}.weight_magnitude")
        if magnitude is not None:
            changed *= (magnitude.double() / changed.norm(dim=1))[:, None]
        merged[name] = changed.to(weight.dtype)
    return merged


class _Draw:
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator) * 0.3


def _adapted(full: Full, linears: Iterable[str]) -> Sequence[str]:
    ends = tuple(f".{linear}.weight" for linear in linears)
    return [name for name in full if name.endswith(ends)]


def _pair(at: str, rows: int, columns: int, rank: int, draw: Callable[..., torch.Tensor], dtype: torch.dtype) -> State:
    return {
        f"{at}.linear_in.weight": draw(rank, columns).to(dtype),
        f"{at}.linear_out.weight": draw(rows, rank).to(dtype),
    }


def _product(adapters: Full, at: str, alpha: float) -> torch.Tensor | None:
    if f"{at}.linear_in.weight" not in adapters:
        return None
    inner, outer = (adapters[f"{at}.linear_{side}.weight"].double() for side in ("in", "out"))
    return alpha / len(inner) * outer @ inner


def _product_of_parts(adapters: Full, at: str, alpha: float, weight: torch.Tensor, groups: int) -> torch.Tensor | None:
    """Of canonical LoRA: what it adds to the whole matrix, zeros where a part has no adapter."""
    found = {
        match[1]: _product(adapters, f"{at}.adapter_{match[1]}", alpha)
        for name in adapters
        if (match := re.fullmatch(re.escape(at) + r"\.adapter_(\w+)\.linear_in\.weight", name))
    }
    if not found:
        return None
    if found.keys() <= {"gate", "up"}:
        parts = {name: torch.zeros(len(weight) // 2, weight.shape[1], dtype=torch.float64) for name in ("gate", "up")}
        return torch.cat(list((parts | found).values()))
    rows = {name: len(product) // groups for name, product in found.items() if product is not None}
    keys = next((rows[name] for name in "kv" if name in rows), None) or (len(weight) // groups - rows["q"]) // 2
    sizes = {"q": len(weight) // groups - 2 * keys, "k": keys, "v": keys}
    whole = torch.zeros(groups, len(weight) // groups, weight.shape[1], dtype=torch.float64)
    start = 0
    for name, size in sizes.items():
        product = found.get(name)
        if product is not None:
            whole[:, start : start + size] = product.unflatten(0, (groups, size))
        start += size
    return whole.flatten(0, 1)
