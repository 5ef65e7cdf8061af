"""What training recorded of the architecture against what config.json says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unshard.errors import ModelError
from unshard.families.sizes import Sizes
from unshard.words import items_in_lines

_SAME = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
}
_LAYOUTS = {
    "rotary_interleaved": "rows of queries and keys are turned in pairs of neighbours, the model turns halves of heads",
    "moe_mlp_glu_interleave_size": "gates and ups of experts lie in alternating blocks",
    "moe_shared_expert_glu_interleave_size": "gates and ups of shared experts lie in alternating blocks",
}
"""Arguments under which weights lie otherwise, in shapes that do not tell (megatron-core `transformer_config.py`)."""
_TURNS_NEIGHBOURS = ("glm4",)
"""Model types that turn pairs of neighbours in transformers too (`modeling_glm4.py`)."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What config.json calls their number, by the family."""


def compare_facts(facts: Mapping[str, Any], sizes: Sizes) -> ModelError | None:
    """All contradictions between the two, in one error; None where they agree as far as both tell."""
    lines = [
        f"{fact} is {found} in training and {key} {expected} in config.json"
        for fact, key in _comparable(facts)
        if (found := _number(facts.get(fact))) is not None
        and (expected := sizes.known(key)) is not None
        and found != expected
    ]
    lines += _compare_experts(_number(facts.get("num_experts")), sizes)
    padded, vocabulary = _number(facts.get("padded_vocab_size")), sizes.known("vocab_size")
    if padded is not None and vocabulary is not None and padded < vocabulary:
        lines.append(f"padded_vocab_size is {padded} in training, less than vocab_size {vocabulary} in config.json")
    if not lines:
        return None
    return ModelError(
        f"config.json contradicts what training recorded:\n{items_in_lines(lines)}",
        hint="give the config.json of the model that was trained with --config DIR",
    )


def other_layouts(facts: Mapping[str, Any], model_type: object) -> str | None:
    """What training recorded of layouts that no family's rules take apart; None where there is nothing of it."""
    known = ("rotary_interleaved",) if model_type in _TURNS_NEIGHBOURS else ()
    lines = [f"{name}: {what}" for name, what in _LAYOUTS.items() if facts.get(name) and name not in known]
    return f"training recorded layouts that the model does not have:\n{items_in_lines(lines)}" if lines else None


def padding_limit(facts: Mapping[str, Any]) -> int | None:
    """The number of rows, of which training adds fewer to a vocabulary that it pads; None where it is not recorded.

    Rows are a multiple of `make_vocab_size_divisible_by` on each tensor-parallel rank (Megatron-LM
    `megatron/training/tokenizer/tokenizer.py`).
    """
    each, ranks = (_number(facts.get(name)) for name in ("make_vocab_size_divisible_by", "tensor_model_parallel_size"))
    return each * ranks if each and ranks else None


def _compare_experts(found: int | None, sizes: Sizes) -> Iterator[str]:
    """The line of a model whose config tells another number of experts."""
    known = {key: number for key in EXPERTS if (number := sizes.known(key)) is not None}
    if found is not None and known and found not in known.values():
        said = ", ".join([f"{key} {number}" for key, number in known.items()])
        yield f"num_experts is {found} in training and {said} in config.json"


def _comparable(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name in Megatron, key of config.json) of the sizes that must be the same for this kind of model."""
    yield from _SAME.items()
    if not facts.get("multi_latent_attention"):
        if facts.get("group_query_attention"):
            yield "num_query_groups", "num_key_value_heads"
        yield "kv_channels", "head_dim"
    if not facts.get("num_experts"):
        yield "ffn_hidden_size", "intermediate_size"


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
