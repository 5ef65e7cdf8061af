"""The vision towers of Qwen under Megatron: rebuilt of Megatron's layers, or kept as they run in transformers.

mbridge and Megatron-Bridge rebuild them below `vision_model.` (ISEEKYAN/mbridge, `mbridge/models/qwen2_5_vl`;
NVIDIA-NeMo/Megatron-Bridge, `models/qwen_vl/qwen3_vl_bridge.py`); Megatron-Bridge keeps that of Qwen 2.5 VL below
`visual.` as it is (`qwen25_vl_bridge.py`).
"""

from __future__ import annotations

from unshard.families.megatron.blocks import Rules, gated_mlp, linear
from unshard.families.rules import rename
from unshard.families.steps import Permute

BLOCK = "vision_model.decoder.layers.{block}"
_BY_HEAD = Permute(("vision.num_heads", "3", "?"), (1, 0, 2))
"""Query, key and value of each head become all queries, all keys, all values."""


def layer_norm(at: str, to: str) -> Rules:
    """Vision towers use their norms as they are, whatever the language model does."""
    return (rename(f"{at}.weight", f"{to}.weight"), rename(f"{at}.bias", f"{to}.bias"))


def block(to: str, feed_forward: Rules) -> Rules:
    """A layer of the tower, from `BLOCK` to `to`."""
    return (
        *layer_norm(f"{BLOCK}.input_layernorm", f"{to}.norm1"),
        *linear(f"{BLOCK}.self_attention.linear_qkv", f"{to}.attn.qkv", _BY_HEAD),
        *linear(f"{BLOCK}.self_attention.linear_proj", f"{to}.attn.proj"),
        *layer_norm(f"{BLOCK}.pre_mlp_layernorm", f"{to}.norm2"),
        *feed_forward,
    )


def plain_mlp(at: str, to: tuple[str, str]) -> Rules:
    """Two linear layers without gates."""
    return (*linear(f"{at}.linear_fc1", to[0]), *linear(f"{at}.linear_fc2", to[1]))


def merger_of_qwen2(to: str = "visual") -> Rules:
    """The last norm and the merger of Qwen 2 VL and 2.5 VL."""
    projection = "vision_model.projection.encoder"
    return (
        *linear("vision_model.patch_embed.proj", f"{to}.patch_embed.proj"),
        *layer_norm("vision_model.decoder.final_layernorm", f"{to}.merger.ln_q"),
        *plain_mlp(projection, (f"{to}.merger.mlp.0", f"{to}.merger.mlp.2")),
    )


def merger_of_qwen3(at: str, to: str) -> Rules:
    """One merger of Qwen 3 VL: the last one, or one of those from deeper layers."""
    return (
        *layer_norm(f"{at}.patch_norm", f"{to}.norm"),
        *plain_mlp(at, (f"{to}.linear_fc1", f"{to}.linear_fc2")),
    )


QWEN2_VL: Rules = (
    rename("visual.{rest}", "visual.{rest}"),
    *block(
        "visual.blocks.{block}",
        plain_mlp(f"{BLOCK}.mlp", ("visual.blocks.{block}.mlp.fc1", "visual.blocks.{block}.mlp.fc2")),
    ),
    *merger_of_qwen2(),
)
QWEN2_5_VL: Rules = (
    rename("visual.{rest}", "visual.{rest}"),
    *block("visual.blocks.{block}", gated_mlp(f"{BLOCK}.mlp", "visual.blocks.{block}.mlp")),
    *merger_of_qwen2(),
)
_HUB_BLOCK = "model.visual.blocks.{block}"
QWEN3_VL: Rules = (
    rename("visual.{rest}", "model.visual.{rest}"),
    *block(_HUB_BLOCK, plain_mlp(f"{BLOCK}.mlp", (f"{_HUB_BLOCK}.mlp.linear_fc1", f"{_HUB_BLOCK}.mlp.linear_fc2"))),
    *linear("vision_model.patch_embed.proj", "model.visual.patch_embed.proj"),
    rename("vision_model.pos_embed.weight", "model.visual.pos_embed.weight"),
    *merger_of_qwen3("vision_model.merger", "model.visual.merger"),
    *merger_of_qwen3(
        "vision_model.decoder.deepstack_merger_list.{merger}", "model.visual.deepstack_merger_list.{merger}"
    ),
)
