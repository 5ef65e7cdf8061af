"""Pieces of the tables from Megatron's names to those of Hugging Face files that many families share.

Each takes where a module lies in Megatron (`at`) and in the file (`to`). Facts: docs/formats/megatron.md.
"""

from __future__ import annotations

from unshard.families.rules import Rule, rename
from unshard.families.steps import Divide, FirstRows, Norm, Sections, Step, Unstack
from unshard.families.tables import GROUPED as GROUPED
from unshard.families.tables import HUB_LAYER as HUB_LAYER
from unshard.families.tables import Rules as Rules
from unshard.families.tables import linear as linear

LAYER = "decoder.layers.{layer}"


def norm(at: str, to: str, *, zero_centred: bool = False) -> Rules:
    """A norm, with its bias where it has one. `zero_centred`: the model in transformers uses it as 1 + weight."""
    weight = Rule(f"{at}.weight", (f"{to}.weight",), (Norm(zero_centred),))
    return weight, rename(f"{at}.bias", f"{to}.bias")


def embeddings(at: str = "", to: str = "model", head: str = "lm_head", *, zero_centred: bool = False) -> Rules:
    """The embedding and the output layer, without the padding of the vocabulary, a value head, and the last norm."""
    rows = FirstRows("vocab_size")
    return (
        Rule(f"{at}embedding.word_embeddings.weight", (f"{to}.embed_tokens.weight",), (rows,)),
        *linear(f"{at}output_layer", head, rows),
        *linear(f"{at}score", "score"),
        *norm(f"{at}decoder.final_layernorm", f"{to}.norm", zero_centred=zero_centred),
    )


def attention(
    at: str = LAYER,
    to: str = HUB_LAYER,
    *,
    zero_centred: bool = False,
    grouped: tuple[Step, ...] = (GROUPED,),
    names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"),
) -> Rules:
    """Grouped-query attention with its norm in front, and norms of the heads where there are any.

    names: in the file, of what `grouped` makes of the queries, keys and values.
    """
    self_attention, self_attn = f"{at}.self_attention", f"{to}.self_attn"
    projections = tuple([f"{self_attn}.{name}" for name in names])
    return (
        *norm(f"{at}.input_layernorm", f"{to}.input_layernorm", zero_centred=zero_centred),
        *linear(f"{self_attention}.linear_qkv", projections, *grouped),
        *norm(f"{self_attention}.q_layernorm", f"{self_attn}.q_norm", zero_centred=zero_centred),
        *norm(f"{self_attention}.k_layernorm", f"{self_attn}.k_norm", zero_centred=zero_centred),
        *linear(f"{self_attention}.linear_proj", f"{self_attn}.o_proj"),
    )


_LATENT = {
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "linear_kv_up_proj": "kv_b_proj",
    "linear_proj": "o_proj",
}
_DOWN = Sections(("q_lora_rank", "kv_lora_rank+qk_rope_head_dim"))


def latent_attention(at: str = LAYER, to: str = HUB_LAYER) -> Rules:
    """Multi-head latent attention with its norm in front; both down projections can be one matrix, queries first.

    Facts: `core/transformer/multi_latent_attention.py`. The rows of rotary dimensions lie alike on both sides.
    """
    self_attention, self_attn = f"{at}.self_attention", f"{to}.self_attn"
    down = (f"{self_attn}.q_a_proj", f"{self_attn}.kv_a_proj_with_mqa")
    projections = [linear(f"{self_attention}.{ours}", f"{self_attn}.{theirs}") for ours, theirs in _LATENT.items()]
    return (
        *norm(f"{at}.input_layernorm", f"{to}.input_layernorm"),
        *[rule for projection in projections for rule in projection],
        *linear(f"{self_attention}.linear_qkv_down_proj", down, _DOWN),
        *norm(f"{self_attention}.q_layernorm", f"{self_attn}.q_a_layernorm"),
        *norm(f"{self_attention}.kv_layernorm", f"{self_attn}.kv_a_layernorm"),
    )


def gated_mlp(at: str, to: str) -> Rules:
    """Gates and ups in one matrix, the gates first."""
    return (
        *linear(f"{at}.linear_fc1", (f"{to}.gate_proj", f"{to}.up_proj"), Divide()),
        *linear(f"{at}.linear_fc2", f"{to}.down_proj"),
    )


def experts(at: str, to: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Rules:
    """Stacked experts below `at`, [experts, 2 * width, hidden] and [experts, hidden, width], one by one in the file."""
    gate, up, down = [f"{to}.experts.{{expert}}.{name}.weight" for name in names]
    return (
        Rule(f"{at}.experts.linear_fc1.weight", (gate, up), (Unstack("expert"), Divide())),
        Rule(f"{at}.experts.linear_fc2.weight", (down,), (Unstack("expert"),)),
    )


def mixture(
    at: str = f"{LAYER}.mlp",
    to: str = f"{HUB_LAYER}.mlp",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Rules:
    """Routed experts and their router, with the bias that balances them (`core/transformer/moe/router.py`)."""
    return (
        *linear(f"{at}.router", f"{to}.gate"),
        rename(f"{at}.router.expert_bias", f"{to}.gate.e_score_correction_bias"),
        *experts(at, to, names),
    )


def dense_layer(at: str = LAYER, to: str = HUB_LAYER, *, zero_centred: bool = False) -> Rules:
    """A layer of Llama and all that share its architecture."""
    return (
        *attention(at, to, zero_centred=zero_centred),
        *norm(f"{at}.pre_mlp_layernorm", f"{to}.post_attention_layernorm", zero_centred=zero_centred),
        *gated_mlp(f"{at}.mlp", f"{to}.mlp"),
    )


DENSE: Rules = (*embeddings(), *dense_layer())
"""Llama, Mistral, Qwen 2 and 3, and what shares their architecture: biases and head norms where they are stored."""

_MLP, _HUB_MLP = f"{LAYER}.mlp", f"{HUB_LAYER}.mlp"

GROUPED_MOE: Rules = (*DENSE, *mixture(), *gated_mlp(f"{_MLP}.shared_experts", f"{_HUB_MLP}.shared_experts"))
"""The same with experts in some layers: Qwen 3, OLMoE, GLM 4.5."""

LATENT_MOE: Rules = (
    *embeddings(),
    *latent_attention(),
    *norm(f"{LAYER}.pre_mlp_layernorm", f"{HUB_LAYER}.post_attention_layernorm"),
    *gated_mlp(_MLP, _HUB_MLP),
    *mixture(),
    *gated_mlp(f"{_MLP}.shared_experts", f"{_HUB_MLP}.shared_experts"),
)
"""DeepSeek and all that share its architecture."""

MTP: Rules = (
    *norm(f"{LAYER}.enorm", f"{HUB_LAYER}.enorm"),
    *norm(f"{LAYER}.hnorm", f"{HUB_LAYER}.hnorm"),
    *linear(f"{LAYER}.eh_proj", f"{HUB_LAYER}.eh_proj"),
    *norm(f"{LAYER}.final_layernorm", f"{HUB_LAYER}.shared_head.norm"),
)
"""What a layer that predicts further tokens has beside a decoder's layer, where files number it as the next one."""
