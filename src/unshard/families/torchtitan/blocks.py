"""Pieces of the tables from the names of torchtitan's models to those of Hugging Face files.

torchtitan gave modules other names over time. A table has all of them, the latest first: read backwards, it leads to
those. Facts: docs/formats/torchtitan.md.
"""

from __future__ import annotations

from itertools import product

from unshard.families.rules import Rule, rename
from unshard.families.steps import OnPart, Permute, Squeeze, Step, Unstack
from unshard.families.tables import GROUPED, HUB_LAYER, Rules, linear

LAYER = "layers.{layer}"
_ATTENTION, _HUB_ATTENTION = f"{LAYER}.attention", f"{HUB_LAYER}.self_attn"
_MOE, _HUB_MLP = f"{LAYER}.moe", f"{HUB_LAYER}.mlp"
_GATED = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def halves(heads: str) -> Permute:
    """Rows of heads whose rotary dimensions are pairs of neighbours: the first of all pairs, then the second of all.

    Llama is trained with pairs (`models/common/rope.py`, `ComplexRoPE`), and turns halves of heads in transformers.
    """
    return Permute((heads, "head_dim//2", "2"), (0, 2, 1))


QUERIES, KEYS = halves("num_attention_heads"), halves("num_key_value_heads")


def embeddings() -> Rules:
    """The embedding, the last norm, and the output layer, `output` until April 2026."""
    return (
        rename("tok_embeddings.weight", "model.embed_tokens.weight"),
        *linear("norm", "model.norm"),
        *linear("lm_head", "lm_head"),
        *linear("output", "lm_head"),
    )


def norms() -> Rules:
    """The two norms of a layer."""
    return (
        *linear(f"{LAYER}.attention_norm", f"{HUB_LAYER}.input_layernorm"),
        *linear(f"{LAYER}.ffn_norm", f"{HUB_LAYER}.post_attention_layernorm"),
    )


def attention(queries: tuple[Step, ...] = (), keys: tuple[Step, ...] = ()) -> Rules:
    """Grouped-query attention, with norms of the heads where there are any.

    queries, keys: what happens to their rows. The three projections lay in `attention` until April 2026, and were
    stored as one matrix where they were one between April and June (`models/common/attention.py`).
    """
    to = {kind: f"{_HUB_ATTENTION}.{kind}_proj" for kind in "qkv"}
    apart = [
        rule
        for at in (f"{_ATTENTION}.qkv_linear", _ATTENTION)
        for kind, steps in (("q", queries), ("k", keys), ("v", ()))
        for rule in linear(f"{at}.w{kind}", to[kind], *steps)
    ]
    on_parts = [OnPart(part, step) for part, steps in enumerate((queries, keys)) for step in steps]
    return (
        *apart,
        *linear(f"{_ATTENTION}.qkv_linear.wqkv", tuple(to.values()), GROUPED, *on_parts),
        *linear(f"{_ATTENTION}.wo", f"{_HUB_ATTENTION}.o_proj"),
        *linear(f"{_ATTENTION}.q_norm", f"{_HUB_ATTENTION}.q_norm"),
        *linear(f"{_ATTENTION}.k_norm", f"{_HUB_ATTENTION}.k_norm"),
    )


_LATENT = {
    "wq": "q_proj",
    "wq_a": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "wq_b": "q_b_proj",
    "wkv_a": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "wkv_b": "kv_b_proj",
    "wo": "o_proj",
}


def latent_attention() -> Rules:
    """Multi-head latent attention: rotary dimensions are pairs of neighbours here and in the file."""
    modules = [linear(f"{_ATTENTION}.{ours}", f"{_HUB_ATTENTION}.{theirs}") for ours, theirs in _LATENT.items()]
    return tuple([rule for module in modules for rule in module])


def gated_mlp(at: str = f"{LAYER}.feed_forward", to: str = _HUB_MLP) -> Rules:
    """Gate, up and down projection."""
    modules = [linear(f"{at}.{ours}", f"{to}.{theirs}") for ours, theirs in _GATED.items()]
    return tuple([rule for module in modules for rule in module])


def expert_names(latest: str, earlier: str) -> tuple[str, ...]:
    """The names of a tensor of all routed experts, the latest first (`models/common/moe.py`)."""
    places = f"{_MOE}.routed_experts.inner_experts", f"{_MOE}.experts"
    return tuple([f"{place}.{name}" for place, name in product(places, (latest, earlier))])


def experts(count: str, width: str, hidden: str = "hidden_size") -> Rules:
    """Routed experts, stacked: gates and ups [count, width, hidden], downs [count, hidden, width]. And their router."""
    axes = {"w1": ("EFD", (count, width, hidden)), "w3": ("EFD", (count, width, hidden))}
    axes["w2"] = "EDF", (count, hidden, width)
    stacks = [
        Rule(name, (f"{_HUB_MLP}.experts.{{expert}}.{_GATED[kind]}.weight",), (Unstack("expert"),), shape)
        for kind, (suffix, shape) in axes.items()
        for name in expert_names(f"{kind}_{suffix}", kind)
    ]
    return (*stacks, *linear(f"{_MOE}.router.gate", f"{_HUB_MLP}.gate"))


def shared_experts() -> Rules:
    """Experts of all tokens: one MLP; until August 2025 a stack of one [1, rows, columns]."""
    to = f"{_HUB_MLP}.shared_experts"
    stacks = [
        Rule(f"{_MOE}.shared_expert.{ours}", (f"{to}.{theirs}.weight",), (Squeeze(),))
        for ours, theirs in _GATED.items()
    ]
    return (*gated_mlp(f"{_MOE}.shared_experts", to), *stacks)


_BALANCE = "expert_bias_E", "expert_bias"

LLAMA: Rules = (*embeddings(), *norms(), *attention((QUERIES,), (KEYS,)), *gated_mlp())
"""Llama 3, and the files of Meta's Llama and of Mistral, whose names and layouts are the same."""

QWEN: Rules = (*embeddings(), *norms(), *attention(), *gated_mlp())
"""Qwen 3, whose rows lie as in transformers (`CosSinRoPE`)."""

QWEN_MOE: Rules = (*QWEN, *experts("num_experts", "moe_intermediate_size"))

DEEPSEEK: Rules = (
    *embeddings(),
    *norms(),
    *latent_attention(),
    *gated_mlp(),
    *experts("n_routed_experts", "moe_intermediate_size"),
    *shared_experts(),
    *[rename(f"{_MOE}.{bias}", f"{_HUB_MLP}.gate.e_score_correction_bias") for bias in _BALANCE],
    *linear(f"{LAYER}.enorm", f"{HUB_LAYER}.enorm"),
    *linear(f"{LAYER}.hnorm", f"{HUB_LAYER}.hnorm"),
    *linear(f"{LAYER}.eh_proj", f"{HUB_LAYER}.eh_proj"),
    *linear(f"{LAYER}.mtp_norm", f"{HUB_LAYER}.shared_head.norm"),
)
"""DeepSeek V3, with the layers that predict further tokens numbered behind the others (`deepseek_v3/mtp.py`)."""
