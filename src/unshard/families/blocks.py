"""Pieces that many families share. Each is a tuple of parameters in the order of torch's `named_parameters()`."""

from __future__ import annotations

from unshard.families.template import (
    Block,
    Condition,
    Contents,
    Flag,
    Has,
    PackedExperts,
    Parameter,
    linear,
    parameter,
)

_QUERIES = "num_attention_heads*head_dim"
_KEYS = "num_key_value_heads*head_dim"

HEAD_NORMS: Contents = (
    parameter("self_attn.q_norm.weight", "head_dim"),
    parameter("self_attn.k_norm.weight", "head_dim"),
)

NORMS: Contents = (
    parameter("input_layernorm.weight", "hidden_size"),
    parameter("post_attention_layernorm.weight", "hidden_size"),
)


NORM: Contents = (parameter("norm.weight", "hidden_size"),)
"""The last norm of a decoder."""


def attention(bias: Condition | bool = False, output_bias: Condition | bool = False) -> Contents:
    """Grouped-query attention with separate projections; `bias` is that of queries, keys and values."""
    return (
        *linear("self_attn.q_proj", _QUERIES, "hidden_size", bias),
        *linear("self_attn.k_proj", _KEYS, "hidden_size", bias),
        *linear("self_attn.v_proj", _KEYS, "hidden_size", bias),
        *linear("self_attn.o_proj", "hidden_size", _QUERIES, output_bias),
    )


def latent_attention() -> Contents:
    """Multi-head latent attention of DeepSeek: keys and values through a low rank, queries where there is one."""
    bias = Flag("attention_bias")
    queries = "num_attention_heads*qk_nope_head_dim+num_attention_heads*qk_rope_head_dim"
    values = "num_attention_heads*v_head_dim"
    low_rank = (
        *linear("self_attn.q_a_proj", "q_lora_rank", "hidden_size", bias),
        parameter("self_attn.q_a_layernorm.weight", "q_lora_rank"),
        *linear("self_attn.q_b_proj", queries, "q_lora_rank"),
    )
    return (
        Block("", linear("self_attn.q_proj", queries, "hidden_size"), when=Has("q_lora_rank", False)),
        Block("", low_rank, when=Has("q_lora_rank")),
        *linear("self_attn.kv_a_proj_with_mqa", "kv_lora_rank+qk_rope_head_dim", "hidden_size", bias),
        parameter("self_attn.kv_a_layernorm.weight", "kv_lora_rank"),
        *linear("self_attn.kv_b_proj", f"num_attention_heads*qk_nope_head_dim+{values}", "kv_lora_rank"),
        *linear("self_attn.o_proj", "hidden_size", values, bias),
    )


def gated_mlp(
    width: str = "intermediate_size", hidden: str = "hidden_size", bias: Condition | bool = False
) -> Contents:
    """Gate, up and down projection."""
    return (
        *linear("gate_proj", width, hidden, bias),
        *linear("up_proj", width, hidden, bias),
        *linear("down_proj", hidden, width, bias),
    )


def packed_experts(count: str, width: str) -> Contents:
    """All experts of a layer as transformers 5 runs them: the gates come before the ups."""
    return (
        parameter("experts.gate_up_proj", count, f"2*{width}", "hidden_size"),
        parameter("experts.down_proj", count, "hidden_size", width),
    )


def experts(count: str, width: str) -> tuple[Block, Block]:
    """Gated experts as they run, without their router: packed under transformers 5, one by one before."""
    return (
        Block("", packed_experts(count, width), when=PackedExperts()),
        Block("experts.{expert}", gated_mlp(width), count=count, when=PackedExperts(False)),
    )


def decoder(*layer: Parameter | Block, at: str = "model", norm: Contents = NORM) -> Contents:
    """A decoder of `num_hidden_layers` equal layers between embedding and norm."""
    return (
        Block(
            at,
            (
                parameter("embed_tokens.weight", "vocab_size", "hidden_size"),
                Block("layers.{layer}", layer, count="num_hidden_layers"),
                *norm,
            ),
        ),
    )


def qwen_vision(width: str, block: Contents, norm: Contents, output: str) -> Contents:
    """Patches, `vision.depth` blocks, and the merger that makes vectors of size `output` of neighbouring patches."""
    patch = ("vision.in_channels", "vision.temporal_patch_size", "vision.patch_size", "vision.patch_size")
    merged = f"{width}*vision.spatial_merge_size*vision.spatial_merge_size"
    merger = (*norm, *linear("mlp.0", merged, merged, bias=True), *linear("mlp.2", output, merged, bias=True))
    return (
        parameter("patch_embed.proj.weight", width, *patch),
        Block("blocks.{block}", block, count="vision.depth"),
        Block("merger", merger),
    )
