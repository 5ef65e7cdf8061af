"""Qwen 3 Next: gated delta nets, every fourth layer gated attention, experts everywhere. Norms are zero-centred."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from unshard.families import qwen2_moe
from unshard.families.blocks import HEAD_NORMS, NORMS, decoder, gated_mlp
from unshard.families.megatron import blocks as megatron
from unshard.families.rules import Rule, rename
from unshard.families.sizes import Default
from unshard.families.steps import Group, Norm, OnPart, Permute, Sections
from unshard.families.template import Block, Contents, Extra, Family, Flag, LayerType, SparseLayer, linear, parameter
from unshard.families.transformers5 import QWEN_MOE

_KEYS, VALUES = "linear_num_key_heads*linear_key_head_dim", "linear_num_value_heads*linear_value_head_dim"
CHANNELS = f"2*{_KEYS}+{VALUES}"

_PER_KEY_HEAD = (
    "linear_key_head_dim",
    "linear_key_head_dim",
    "linear_num_value_heads*linear_value_head_dim//linear_num_key_heads",
    "linear_num_value_heads*linear_value_head_dim//linear_num_key_heads",
)
_RATIO = "linear_num_value_heads//linear_num_key_heads"

DELTA_NET_STATE: Contents = (
    parameter("linear_attn.dt_bias", "linear_num_value_heads"),
    parameter("linear_attn.A_log", "linear_num_value_heads"),
    parameter("linear_attn.conv1d.weight", CHANNELS, "1", "linear_conv_kernel_dim"),
)
DELTA_NET_OUTPUT: Contents = (
    parameter("linear_attn.norm.weight", "linear_value_head_dim"),
    *linear("linear_attn.out_proj", "hidden_size", VALUES),
)
DELTA_NET: Contents = (
    *DELTA_NET_STATE,
    *linear("linear_attn.in_proj_qkvz", f"{CHANNELS}+{VALUES}", "hidden_size"),
    *linear("linear_attn.in_proj_ba", "2*linear_num_value_heads", "hidden_size"),
    *DELTA_NET_OUTPUT,
)

_BIAS = Flag("attention_bias")
GATED_ATTENTION: Contents = (
    *linear("self_attn.q_proj", "2*num_attention_heads*head_dim", "hidden_size", _BIAS),
    *linear("self_attn.k_proj", "num_key_value_heads*head_dim", "hidden_size", _BIAS),
    *linear("self_attn.v_proj", "num_key_value_heads*head_dim", "hidden_size", _BIAS),
    *linear("self_attn.o_proj", "hidden_size", "num_attention_heads*head_dim", _BIAS),
    *HEAD_NORMS,
)


def hybrid(delta_net: Contents) -> Contents:
    """Delta nets and gated attention, as `layer_types` has them."""
    return (
        Block("", delta_net, when=LayerType("linear_attention")),
        Block("", GATED_ATTENTION, when=LayerType("full_attention")),
    )


# Megatron ------------------------------------------------------------------------------------------------------------

_HEADS_OF_A_GROUP = "num_attention_heads//num_key_value_heads"
_GROUP_OF_GATED = ("2*num_attention_heads*head_dim//num_key_value_heads", "head_dim", "head_dim")
GATED = (
    Sections(_GROUP_OF_GATED, groups="num_key_value_heads"),
    OnPart(0, Permute(("num_key_value_heads", "2", _HEADS_OF_A_GROUP, "head_dim"), (0, 2, 1, 3))),
)
"""Rows of `linear_qkv` with gates: for each key head its queries, their gates, the key, the value; the file has query
and gate of each head together (NVIDIA/Megatron-LM, `core/transformer/attention.py`)."""


def megatron_delta_net(at: str, to: str) -> megatron.Rules:
    """A gated delta net but for its projections (`core/ssm/gated_delta_net.py`)."""
    linear_attn = f"{to}.linear_attn"
    return (
        rename(f"{at}.self_attention.conv1d.weight", f"{linear_attn}.conv1d.weight"),
        rename(f"{at}.self_attention.A_log", f"{linear_attn}.A_log"),
        rename(f"{at}.self_attention.dt_bias", f"{linear_attn}.dt_bias"),
        Rule(f"{at}.self_attention.out_norm.weight", (f"{linear_attn}.norm.weight",), (Norm(),)),
        *megatron.linear(f"{at}.self_attention.out_proj", f"{linear_attn}.out_proj"),
    )


def megatron_mtp(at: str, to: str) -> megatron.Rules:
    """What stands around the layer that predicts further tokens."""
    return (
        *megatron.linear(f"{at}.eh_proj", f"{to}.fc"),
        *megatron.norm(f"{at}.enorm", f"{to}.pre_fc_norm_embedding", zero_centred=True),
        *megatron.norm(f"{at}.hnorm", f"{to}.pre_fc_norm_hidden", zero_centred=True),
        *megatron.norm(f"{at}.final_layernorm", f"{to}.norm", zero_centred=True),
    )


def megatron_model(
    feed_forward: Callable[[str, str], megatron.Rules],
    projections: Callable[[str, str], megatron.Rules],
    at: str = "",
    to: str = "model",
) -> megatron.Rules:
    """A whole model. `feed_forward` and `projections` (of a delta net) make rules for a layer from `at` to `to`."""

    def layer(inside: str, outside: str) -> megatron.Rules:
        return (
            *megatron.attention(inside, outside, zero_centred=True, grouped=GATED),
            *megatron.norm(f"{inside}.pre_mlp_layernorm", f"{outside}.post_attention_layernorm", zero_centred=True),
            *feed_forward(f"{inside}.mlp", f"{outside}.mlp"),
        )

    decoder_layer = f"{at}decoder.layers.{{layer}}", f"{to}.layers.{{layer}}"
    mtp = f"{at}mtp.layers.0"
    return (
        *megatron.embeddings(at, to, zero_centred=True),
        *layer(*decoder_layer),
        *megatron_delta_net(*decoder_layer),
        *projections(*decoder_layer),
        *megatron_mtp(mtp, "mtp"),
        *layer(f"{mtp}.transformer_layer", "mtp.layers.0"),
    )


def feed_forward_of_experts(at: str, to: str) -> megatron.Rules:
    """Routed experts beside a shared one with a gate."""
    return (*megatron.gated_mlp(at, to), *megatron.mixture(at, to), *qwen2_moe.shared_expert(at, to))


def _projections(at: str, to: str) -> megatron.Rules:
    """`in_proj` is queries, keys, values, z, beta, alpha; the file has them by key head, in two matrices."""
    flat = Sections((f"{CHANNELS}+{VALUES}", "2*linear_num_value_heads"))
    by_key_head = OnPart(0, Group(_PER_KEY_HEAD, "linear_num_key_heads"))
    betas_and_alphas = OnPart(1, Group((_RATIO, _RATIO), "linear_num_key_heads"))
    parts = tuple([f"{to}.linear_attn.{name}.weight" for name in ("in_proj_qkvz", "in_proj_ba")])
    return (Rule(f"{at}.self_attention.in_proj.weight", parts, (flat, by_key_head, betas_and_alphas)),)


def mtp_extra(layer: Contents) -> Extra:
    """The layer that predicts further tokens, made of the same parts as `layer`; no config tells of it."""
    return Extra(
        (
            Block(
                "mtp",
                (
                    *linear("fc", "hidden_size", "2*hidden_size"),
                    parameter("pre_fc_norm_embedding.weight", "hidden_size"),
                    parameter("pre_fc_norm_hidden.weight", "hidden_size"),
                    parameter("norm.weight", "hidden_size"),
                    Block("layers.0", (*GATED_ATTENTION, *layer, *NORMS)),
                ),
            ),
        )
    )


DEFAULTS: Mapping[str, Default] = {
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "megatron.apply_layernorm_1p": True,
}

EXPERTS_IN_FILE = (
    *qwen2_moe.ROUTER,
    Block("experts.{expert}", gated_mlp("moe_intermediate_size"), count="num_experts"),
    *qwen2_moe.SHARED,
)

FAMILY = Family(
    model_type="qwen3_next",
    prefix="Qwen3Next",
    parameters=decoder(
        *hybrid(DELTA_NET),
        qwen2_moe.DENSE,
        Block("mlp", (*qwen2_moe.ROUTER, qwen2_moe.PACKED, qwen2_moe.SINGLE, *qwen2_moe.SHARED), when=SparseLayer()),
        *NORMS,
    ),
    rules=QWEN_MOE,
    defaults={**qwen2_moe.DEFAULTS, **DEFAULTS},
    extras=(mtp_extra((Block("mlp", EXPERTS_IN_FILE),)),),
    megatron=megatron_model(feed_forward_of_experts, _projections),
)
