"""Names and layouts of torchtitan's models against config.json: what is left out, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from unshard import families
from unshard.checkpoint import Checkpoint, Shape
from unshard.dtypes import F32
from unshard.errors import ModelError
from unshard.families import FAMILIES
from unshard.families.rules import Rule
from unshard.families.translation import Translation
from unshard.options import MergeOptions
from unshard.tensors import Tensor
from unshard.translating import translate as translate_with_options

LLAMA = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 6, "vocab_size": 10}  # fmt: skip
OUTER: dict[str, Shape] = {"tok_embeddings.weight": (10, 8), "norm.weight": (8,), "output.weight": (10, 8)}
LAYER: dict[str, Shape] = {
    "attention.wq.weight": (8, 8), "attention.wk.weight": (4, 8), "attention.wv.weight": (4, 8),
    "attention.wo.weight": (8, 8), "attention_norm.weight": (8,), "ffn_norm.weight": (8,),
    "feed_forward.w1.weight": (6, 8), "feed_forward.w2.weight": (8, 6), "feed_forward.w3.weight": (6, 8),
}  # fmt: skip
MODEL: dict[str, Shape] = OUTER | {f"layers.0.{name}": shape for name, shape in LAYER.items()}

MOE = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 3, "moe_intermediate_size": 5, "head_dim": 2}
DEEPSEEK = {"model_type": "deepseek_v3", "num_hidden_layers": 2, "n_routed_experts": 3, "kv_lora_rank": 4}


def catalog(shapes: Mapping[str, Shape], **more: Any) -> Checkpoint:
    tensors = {name: Tensor(name, F32, shape, ()) for name, shape in shapes.items()}
    return Checkpoint("dcp", "", {}, tensors, dialect="torchtitan", **more)


def translate(shapes: Mapping[str, Shape], config: Mapping[str, Any] = LLAMA, *rules: Rule) -> Translation:
    return families.translate(catalog(shapes), config, rules)


def problem_of(translation: Translation) -> str:
    (problem,) = translation.problems
    assert isinstance(problem, ModelError)
    return str(problem)


def test_every_name_of_a_layer_has_its_place() -> None:
    found = translate(MODEL)
    assert not found.problems
    assert {name: tensor.shape for name, tensor in found.tensors.items()} == {
        "model.embed_tokens.weight": (10, 8), "model.norm.weight": (8,), "lm_head.weight": (10, 8),
        "model.layers.0.self_attn.q_proj.weight": (8, 8), "model.layers.0.self_attn.k_proj.weight": (4, 8),
        "model.layers.0.self_attn.v_proj.weight": (4, 8), "model.layers.0.self_attn.o_proj.weight": (8, 8),
        "model.layers.0.input_layernorm.weight": (8,), "model.layers.0.post_attention_layernorm.weight": (8,),
        "model.layers.0.mlp.gate_proj.weight": (6, 8), "model.layers.0.mlp.down_proj.weight": (8, 6),
        "model.layers.0.mlp.up_proj.weight": (6, 8),
    }  # fmt: skip


def test_the_report_says_which_heads_were_taken() -> None:
    (note,) = translate(MODEL).notes
    assert "for 4 heads (2 of keys) of 2 rows, as config.json says" in note.text
    assert note.tensors == ("layers.0.attention.wq.weight", "layers.0.attention.wk.weight")
    assert translate(MODEL, {**LLAMA, "model_type": "qwen3", "head_dim": 2}).notes == ()


@pytest.mark.parametrize(("key", "value"), [("num_attention_heads", 8), ("num_key_value_heads", 1), ("head_dim", 4)])
def test_heads_that_shapes_contradict_are_refused(key: str, value: int) -> None:
    said = problem_of(translate(MODEL, {**LLAMA, key: value}))
    assert "do not fit the model's configuration" in said
    assert "attention.wk.weight: axis 0 of [4, 8] is not num_key_value_heads x head_dim//2 x 2" in said


def test_a_config_without_heads_is_asked_for_them() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "num_attention_heads"}
    assert "--num-attention-heads" in problem_of(translate(MODEL, config))
    options = MergeOptions(attention_heads=4)
    assert translate_with_options(catalog(MODEL, config=config), options)[1] is not None


BUFFERS = ["freqs_cis", "rope.freqs", "layers.0.attention.inner_attention.rope.freqs", "layers.0.attention.rope.cache"]


@pytest.mark.parametrize("name", BUFFERS)
def test_what_models_compute_is_left_out(name: str) -> None:
    found = translate(MODEL | {name: (16, 1)})
    assert not found.problems
    assert len(found.tensors) == len(MODEL)
    assert any(note.tensors == (name,) and note.level == "note" for note in found.notes)


def test_counters_are_left_out() -> None:
    found = translate({"layers.0.moe.tokens_per_expert": (3,), "layers.0.moe.router.gate.weight": (3, 8)}, MOE)
    assert (list(found.tensors), found.problems) == (["model.layers.0.mlp.gate.weight"], ())


def test_a_bias_that_the_model_has_no_place_for_is_left_out_with_a_warning() -> None:
    for name in ("layers.0.moe.expert_bias", "layers.0.moe.expert_bias_E"):
        found = translate({name: (3,)}, MOE)
        (note,) = found.notes
        assert (note.level, note.tensors, found.tensors) == ("warning", (name,), {})
        kept = translate({name: (3,)}, DEEPSEEK)
        assert list(kept.tensors) == ["model.layers.0.mlp.gate.e_score_correction_bias"]
        assert kept.notes == ()


def test_adapters_are_refused_by_name() -> None:
    said = problem_of(translate(MODEL | {f"layers.0.attention.wq.lora_{part}.weight": (2, 8) for part in "ab"}))
    assert "(2 tensors: `layers.0.attention.wq.lora_a.weight`" in said
    assert "--names stored" in said


def test_unknown_names_are_listed_and_resembled() -> None:
    said = problem_of(translate(MODEL | {f"layers.{n}.attention.wqq.weight": (8, 8) for n in range(3)} | {"x": (1,)}))
    assert "4 tensors unknown to the rules for 'llama' models" in said
    assert "layers.[0-2].attention.wqq.weight (3 tensors), close to layers.{layer}.attention.wq.weight" in said
    assert "\n  x\n" in said
    assert "torchtitan's own names with --names stored" in said


def test_a_model_without_a_table_is_refused() -> None:
    said = problem_of(translate(MODEL, {"model_type": "qwen2"}))
    assert "no rules lead from torchtitan's names to those of a 'qwen2' model" in said


def test_rules_of_ones_own_come_first() -> None:
    own = Rule("layers.{layer}.attention_norm.weight", ("model.layers.{layer}.own.weight",), own=True)
    found = translate(MODEL, LLAMA, own)
    assert found.own == {"model.layers.0.own.weight"}
    assert "model.layers.0.input_layernorm.weight" not in found.tensors


def test_a_map_can_name_a_family_whose_table_is_torchtitans(tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_text('family = "llama"\n')
    checkpoint = catalog(MODEL, config={**LLAMA, "model_type": "other", "head_dim": 2})
    checkpoint, translation = translate_with_options(checkpoint, MergeOptions(map=tmp_path / "map.toml"))
    assert translation is not None
    assert "model.layers.0.self_attn.q_proj.weight" in checkpoint.tensors


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("moe.experts.w1", (3, 8, 5)),
        ("moe.routed_experts.inner_experts.w2_EDF", (3, 5, 8)),
        ("moe.experts.w3_EFD", (4, 5, 8)),
    ],
    ids=["as-stored-before-august-2025", "transposed", "another-number"],
)
def test_experts_of_other_shapes_are_refused(name: str, shape: Shape) -> None:
    said = problem_of(translate({f"layers.0.{name}": shape}, MOE))
    assert f"layers.0.{name} has shape {list(shape)}, not [3, " in said


def test_a_stack_of_shared_experts_holds_one() -> None:
    said = problem_of(translate({"layers.1.moe.shared_expert.w1": (2, 5, 8)}, DEEPSEEK))
    assert "whose first axis is not of length 1" in said


def test_latent_attention_that_turns_halves_is_refused() -> None:
    shapes: dict[str, Shape] = {"layers.0.attention.wkv_a.weight": (6, 8)}
    said = problem_of(translate(shapes, {**DEEPSEEK, "rope_interleave": False}))
    assert "rope_interleave false" in said
    assert not translate(shapes, {**DEEPSEEK, "rope_interleave": True}).problems


def test_layers_of_further_tokens_are_not_numbered_like_others() -> None:
    shapes: dict[str, Shape] = {f"{layer}.enorm.weight": (8,) for layer in ("mtp_layers.0", "layers.2")}
    said = problem_of(translate(shapes, DEEPSEEK))
    assert "mtp_layers.0.enorm.weight and layers.2.enorm.weight would both become layers.2.enorm.weight" in said


def test_two_ages_of_one_tensor_are_refused() -> None:
    said = problem_of(translate(MODEL | {"lm_head.weight": (10, 8)}))
    assert "output.weight and lm_head.weight would both become lm_head.weight" in said


def test_without_a_config_nothing_can_be_known() -> None:
    with pytest.raises(ModelError, match="torchtitan records nothing of the architecture") as error:
        translate_with_options(catalog(MODEL), MergeOptions())
    assert "--config DIR" in str(error.value)
    assert "--weights-only" in str(error.value)


@pytest.mark.parametrize("options", [MergeOptions(weights_only=True), MergeOptions(names="stored")])
def test_stored_names_can_be_kept(options: MergeOptions) -> None:
    checkpoint = catalog(MODEL)
    assert translate_with_options(checkpoint, options) == (checkpoint, None)


def test_every_age_of_a_name_is_read() -> None:
    rules = FAMILIES["deepseek_v3"].torchtitan
    by_parts: dict[tuple[str, ...], list[str]] = {}
    for rule in rules:
        by_parts.setdefault(rule.parts, []).append(rule.whole)
    ages = by_parts[("model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",)]
    assert ages[0] == "layers.{layer}.moe.routed_experts.inner_experts.w1_EFD"
    assert {"layers.{layer}.moe.experts.w1_EFD", "layers.{layer}.moe.experts.w1"} < set(ages)
    assert by_parts[("lm_head.weight",)] == ["lm_head.weight", "output.weight"]
