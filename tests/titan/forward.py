"""What torchtitan's models compute, in plain torch over their own names: causal language models of one sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

State = dict[str, torch.Tensor]


def forward(state: State, tokens: torch.Tensor, config: Any) -> torch.Tensor:
    """Logits [tokens, vocabulary] of tokens [tokens]."""
    hidden = state["tok_embeddings.weight"][tokens]
    for number in range(config.num_hidden_layers):
        layer = {
            name.removeprefix(at): value for name, value in state.items() if name.startswith(at := f"layers.{number}.")
        }
        attend = latent_attention if "attention.wkv_a.weight" in layer else attention
        hidden = hidden + attend(layer, norm(hidden, layer, "attention_norm", config), config)
        gated = norm(hidden, layer, "ffn_norm", config)
        w1, w2, w3 = (layer[f"feed_forward.w{number}.weight"] for number in (1, 2, 3))
        hidden = hidden + (silu(gated @ w1.T) * (gated @ w3.T)) @ w2.T
    return norm(hidden, state, "norm", config) @ state["lm_head.weight"].T


def norm(hidden: torch.Tensor, state: State, name: str, config: Any) -> torch.Tensor:
    return rms_norm(hidden, hidden.shape[-1:], state[f"{name}.weight"], config.rms_norm_eps)


def turn_pairs(rows: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary positions of [tokens, heads, width], neighbours being the parts of complex numbers (`ComplexRoPE`)."""
    width = rows.shape[-1]
    frequencies = 1.0 / theta ** (torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(len(rows)).float(), frequencies)
    turned = (
        torch.view_as_complex(rows.unflatten(-1, (-1, 2)).contiguous())
        * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    return torch.view_as_real(turned).flatten(-2)


def turn_halves(rows: torch.Tensor, theta: float) -> torch.Tensor:
    """The same, with halves of heads instead of neighbours (`CosSinRoPE`)."""
    pairs = rows.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return turn_pairs(pairs, theta).unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Causal attention of [tokens, heads, width]; keys and values are repeated for groups of queries."""
    repeat = queries.shape[1] // keys.shape[1]
    keys, values = (part.repeat_interleave(repeat, 1) for part in (keys, values))
    parts = (part.transpose(0, 1) for part in (queries, keys, values))
    return scaled_dot_product_attention(*parts, is_causal=True).transpose(0, 1).flatten(1)


def attention(layer: State, hidden: torch.Tensor, config: Any) -> torch.Tensor:
    turn = turn_pairs if config.model_type == "llama" else turn_halves
    queries, keys, values = (
        (hidden @ layer[f"attention.qkv_linear.w{part}.weight"].T).unflatten(-1, (-1, config.head_dim))
        for part in "qkv"
    )
    if "attention.q_norm.weight" in layer:
        queries, keys = (
            norm(part, layer, f"attention.{name}", config) for part, name in ((queries, "q_norm"), (keys, "k_norm"))
        )
    theta = config.rope_parameters["rope_theta"]
    return attend(turn(queries, theta), turn(keys, theta), values) @ layer["attention.wo.weight"].T


def latent_attention(layer: State, hidden: torch.Tensor, config: Any) -> torch.Tensor:
    plain, rotary, rank = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
    theta = config.rope_parameters["rope_theta"]
    low = hidden @ layer["attention.wq_a.weight"].T
    queries = norm(low, layer, "attention.q_norm", config) @ layer["attention.wq_b.weight"].T
    queries = queries.unflatten(-1, (-1, plain + rotary))
    queries = torch.cat([queries[..., :plain], turn_pairs(queries[..., plain:], theta)], -1)
    low, turned = (hidden @ layer["attention.wkv_a.weight"].T).split([rank, rotary], -1)
    both = (norm(low, layer, "attention.kv_norm", config) @ layer["attention.wkv_b.weight"].T).unflatten(
        -1, (-1, plain + config.v_head_dim)
    )
    turned = turn_pairs(turned[:, None], theta).expand(-1, both.shape[1], -1)
    keys, values = torch.cat([both[..., :plain], turned], -1), both[..., plain:]
    return attend(queries, keys, values) @ layer["attention.wo.weight"].T
