"""Whatever a config.json holds, naming ends in a model or in problems for people."""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from unshard.dtypes import F32
from unshard.errors import UnshardError
from unshard.families import FAMILIES, expected_shapes, name_model
from unshard.families.naming.lists import summarize
from unshard.options import MergeOptions
from unshard.tensors import Tensor

KEYS = (
    "architectures", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
    "num_hidden_layers", "head_dim", "tie_word_embeddings", "text_config", "vision_config", "id2label", "num_labels",
    "num_experts", "num_local_experts", "moe_intermediate_size", "mlp_only_layers", "decoder_sparse_step",
    "transformers_version", "depth", "embed_dim",
)  # fmt: skip

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.integers() | st.floats() | st.text(max_size=3)
    | st.sampled_from(["4.57.1", "Qwen2ForCausalLM", "LlamaForTokenClassification"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6),
    max_leaves=8,
)  # fmt: skip

NAMES = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    "score.weight",
    "v_head.summary.weight",
    "model.layers.0.mlp.experts.gate_up_proj",
    "model.layers.0.mlp.experts.down_proj",
    "model.language_model.layers.0.mlp.experts.down_proj",
    "model.vision_tower.x",
    "model.rotary_emb.inv_freq",
    "_orig_mod.lm_head.weight",
    "module",
    "",
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([*FAMILIES, "qwen3_vl_moe", "llava", "olmoe", "novel", "gemma2"]),
    st.dictionaries(st.sampled_from(KEYS), JUNK),
    st.dictionaries(st.sampled_from(NAMES), st.lists(st.integers(0, 4), max_size=3).map(tuple)),
    st.sampled_from([None, True, False]),
    st.booleans(),
)
def test_no_config_and_no_names_bring_naming_down(
    model_type: str, config: dict[str, Any], shapes: dict[str, tuple[int, ...]], ties: bool | None, value: bool
) -> None:
    config["model_type"] = model_type
    tensors = {name: Tensor(name, F32, shape, ()) for name, shape in shapes.items()}
    model = name_model(tensors, config, MergeOptions(tie_embeddings=ties, value_model=value))
    assert model.problems or len(model.tensors) + len(model.dropped) >= len(tensors)
    with contextlib.suppress(UnshardError):
        expected_shapes(config)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.sampled_from("ab")), unique=True))
def test_short_lists_stand_for_all_names(places: list[tuple[int, int, str]]) -> None:
    names = [f"layers.{layer}.experts.{expert}.{letter}" for layer, expert, letter in places]
    lines = summarize(names)
    assert sum(lines.values()) == len(names)
    assert set(expand(lines)) == set(names)


def expand(lines: dict[str, int]) -> list[str]:
    """The names that lines with ranges stand for."""
    names = []
    for line in lines:
        pending = [line]
        while pending:
            head, bracket, rest = pending.pop().partition("[")
            if not bracket:
                names.append(head)
                continue
            ranges, _, tail = rest.partition("]")
            for part in ranges.split(","):
                low, _, high = part.partition("-")
                pending += [f"{head}{number}{tail}" for number in range(int(low), int(high or low) + 1)]
    return names
