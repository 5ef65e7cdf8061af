"""Pieces of the tables from Megatron's names to those of Hugging Face files that many families share.

Each takes where a module lies in Megatron (`at`) and in the file (`to`). Facts: docs/formats/megatron.md.
"""

from __future__ import annotations

from typing import TypeAlias

from unshard.families.rules import Rule, rename
from unshard.families.steps import Divide, FirstRows, Norm, Sections, Step, Unstack

Rules: TypeAlias = tuple[Rule, ...]

LAYER = "decoder.layers.{layer}"
HUB_LAYER = "model.layers.{layer}"

_QUERIES_OF_A_GROUP = "num_attention_heads*head_dim//num_key_value_heads"
GROUPED = Sections((_QUERIES_OF_A_GROUP, "head_dim", "head_dim"), groups="num_key_value_heads")
"""Rows of `linear_qkv`: for each key head its queries, the key, the value (`core/transformer/attention.py`)."""


def norm(at: str, to: str, *, zero_centred: bool = False, bias: bool = False) -> Rules:
    """A norm. `zero_centred`: the model in transformers uses it as 1 + weight."""
    weight = Rule(f"{at}.weight", (f"{to}.weight",), (Norm(zero_centred),))
    return (weight, rename(f"{at}.bias", f"{to}.bias")) if bias else (weight,)


def linear(at: str, to: str | tuple[str, ...], *steps: Step) -> Rules:
    """Weight and bias of a linear layer; with steps, the same for both: they must only touch rows."""
    to = (to,) if isinstance(to, str) else to
    return tuple([Rule(f"{at}.{kind}", tuple([f"{part}.{kind}" for part in to]), steps) for kind in ("weight", "bias")])


def embeddings(at: str = "", to: str = "model", head: str = "lm_head", *, zero_centred: bool = False) -> Rules:
    """The embedding and the output layer, without the padding of the vocabulary, and the last norm."""
    rows = FirstRows("vocab_size")
    return (
        Rule(f"{at}embedding.word_embeddings.weight", (f"{to}.embed_tokens.weight",), (rows,)),
        *linear(f"{at}output_layer", head, rows),
        *norm(f"{at}decoder.final_layernorm", f"{to}.norm", zero_centred=zero_centred),
    )


def attention(at: str = LAYER, to: str = HUB_LAYER, *, zero_centred: bool = False, grouped: Step = GROUPED) -> Rules:
    """Grouped-query attention with its norm in front, and norms of the heads where there are any."""
    self_attention, self_attn = f"{at}.self_attention", f"{to}.self_attn"
    projections = tuple([f"{self_attn}.{letter}_proj" for letter in "qkv"])
    return (
        *norm(f"{at}.input_layernorm", f"{to}.input_layernorm", zero_centred=zero_centred),
        *linear(f"{self_attention}.linear_qkv", projections, grouped),
        *norm(f"{self_attention}.q_layernorm", f"{self_attn}.q_norm", zero_centred=zero_centred),
        *norm(f"{self_attention}.k_layernorm", f"{self_attn}.k_norm", zero_centred=zero_centred),
        *linear(f"{self_attention}.linear_proj", f"{self_attn}.o_proj"),
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


def dense_layer(at: str = LAYER, to: str = HUB_LAYER, *, zero_centred: bool = False) -> Rules:
    """A layer of Llama and all that share its architecture."""
    return (
        *attention(at, to, zero_centred=zero_centred),
        *norm(f"{at}.pre_mlp_layernorm", f"{to}.post_attention_layernorm", zero_centred=zero_centred),
        *gated_mlp(f"{at}.mlp", f"{to}.mlp"),
    )


DENSE: Rules = (*embeddings(), *dense_layer())
"""Llama, Mistral, Qwen 2 and 3, and what shares their architecture: biases and head norms where they are stored."""
