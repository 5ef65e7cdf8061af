"""Naming where something must be decided: ties, heads, names as stored or as in a reference."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from outlines import (
    EMBEDDING,
    HEAD,
    MOE,
    QWEN2,
    TIED,
    TIED_VISION,
    VISION,
    name,
    outline,
    outlines,
    prefixed,
    running,
    texts,
    the_problem,
)
from unshard.checkpoint import Checkpoint
from unshard.dtypes import BF16
from unshard.errors import UsageError
from unshard.model import Model
from unshard.model_config import is_tied
from unshard.tensors import Computed, SourceFile, Tensor, Value, contiguous_chunk


class TestTies:
    def both(self, config: dict[str, Any]) -> dict[str, Value]:
        return {**running(config), **outline(HEAD, 20, 8)}

    def test_a_tied_head_is_left_out_under_the_claim_that_it_equals_the_embedding(self) -> None:
        model = name(self.both(TIED), TIED)
        assert not model.problems
        assert HEAD not in model.tensors
        assert model.dropped == {HEAD: f"tied to {EMBEDDING}"}
        (claim,) = model.claims
        assert (claim.left.name, claim.right.name) == (HEAD, EMBEDDING)
        assert "--tie-word-embedding" in str(claim.hint)
        assert "--untie-word-embedding" in str(claim.hint)

    def test_the_way_out_that_ties_makes_no_claim(self) -> None:
        model = name(self.both(TIED), TIED, tie_embeddings=True)
        assert HEAD not in model.tensors
        assert not model.claims
        assert not model.config_changes

    def test_the_way_out_that_unties_keeps_both_and_says_so_in_the_config(self) -> None:
        model = name(self.both(TIED), TIED, tie_embeddings=False)
        assert not model.problems
        assert {HEAD, EMBEDDING} <= set(model.tensors)
        assert not model.claims
        assert model.config_changes == {"tie_word_embeddings": False}

    def test_nested_configs_are_untied_in_both_places(self) -> None:
        config = {**VISION, "text_config": {**VISION["text_config"], "tie_word_embeddings": True}}
        model = name(self.both(config), config, tie_embeddings=False)
        assert model.config_changes["tie_word_embeddings"] is False
        assert model.config_changes["text_config"]["tie_word_embeddings"] is False

    def test_an_untied_model_without_head_is_a_problem_with_a_way_out(self) -> None:
        problem = the_problem(name(running(TIED), QWEN2))
        assert HEAD in problem.message
        assert "--tie-word-embedding" in str(problem.hint)
        foreign = name({key.upper(): value for key, value in running(TIED).items()}, QWEN2).problems
        assert not any("--tie-word-embedding" in str(problem.hint) for problem in foreign)
        model = name(running(TIED), QWEN2, tie_embeddings=True)
        assert not model.problems
        assert model.config_changes == {"tie_word_embeddings": True}

    def test_tying_an_untied_model_by_request_claims_equality(self) -> None:
        model = name(running(QWEN2), QWEN2, tie_embeddings=True)
        assert HEAD not in model.tensors
        (claim,) = model.claims
        assert claim.message.startswith("--tie-word-embedding ties lm_head.weight")
        assert model.config_changes == {"tie_word_embeddings": True}

    def test_a_tied_model_stored_under_the_head_alone_gets_its_embedding(self) -> None:
        tensors = {HEAD if key == EMBEDDING else key: value for key, value in running(TIED).items()}
        model = name(tensors, TIED)
        assert not model.problems
        assert EMBEDDING in model.tensors
        assert HEAD not in model.tensors

    def test_untying_what_is_stored_once_is_an_error(self) -> None:
        (problem,) = name(running(TIED), TIED, tie_embeddings=False).problems
        assert isinstance(problem, UsageError)

    def test_types_that_tie_by_default_are_tied_without_a_word_in_the_config(self) -> None:
        config = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}
        tensors = outlines({EMBEDDING: (20, 8), HEAD: (20, 8)})
        assert HEAD not in name(tensors, config).tensors
        assert HEAD in name(tensors, {**config, "tie_word_embeddings": False}).tensors
        assert HEAD in name(tensors, {**config, "model_type": "novel"}).tensors

    def test_an_adapter_fused_into_one_of_both_is_a_problem(self) -> None:
        tensors = self.both(TIED)
        tensors[HEAD] = Computed(HEAD, BF16, (20, 8), "lora_fuse", {}, (), ())
        assert "adapter" in the_problem(name(tensors, TIED)).message


class TestHeads:
    CRITIC: ClassVar[dict[str, Any]] = {
        **QWEN2,
        "architectures": ["Qwen2ForTokenClassification"],
        "id2label": {"0": "LABEL_0"},
    }

    def test_a_critic_comes_out_with_its_head(self) -> None:
        model = name(running(self.CRITIC), self.CRITIC, value_model=True)
        assert not model.problems
        assert model.family == "Qwen2ForTokenClassification"
        assert not model.config_changes

    def test_a_critic_whose_config_is_of_the_language_model_becomes_loadable(self) -> None:
        model = name(running(self.CRITIC), TIED)
        assert not model.problems
        assert model.family == "Qwen2ForTokenClassification"
        assert model.config_changes == {"architectures": ["Qwen2ForTokenClassification"], "num_labels": 1}
        assert "architectures becomes Qwen2ForTokenClassification (was Qwen2ForCausalLM)" in texts(model)

    def test_a_score_head_without_bias_is_a_sequence_classifier(self) -> None:
        tensors = running(self.CRITIC)
        del tensors["score.bias"]
        model = name(tensors, QWEN2)
        assert not model.problems
        assert model.config_changes["architectures"] == ["Qwen2ForSequenceClassification"]

    def test_labels_that_do_not_fit_are_replaced(self) -> None:
        config = {**self.CRITIC, "id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}
        model = name(running(self.CRITIC), config)
        assert not model.problems
        assert model.config_changes == {"num_labels": 1, "id2label": None, "label2id": None}

    def test_a_value_head_of_trl_stays_beside_the_model(self) -> None:
        tensors = prefixed(running(QWEN2), "pretrained_model.")
        tensors |= outlines({"v_head.summary.weight": (1, 8), "v_head.summary.bias": (1,)})
        model = name(tensors, QWEN2, value_model=True)
        assert not model.problems
        assert list(model.tensors) == [*running(QWEN2), "v_head.summary.weight", "v_head.summary.bias"]
        assert "v_head" in texts(model)

    def test_a_value_model_without_value_head_is_a_problem(self) -> None:
        problem = the_problem(name(running(QWEN2), QWEN2, value_model=True))
        assert "there is no value head" in problem.message

    def test_an_unknown_critic_becomes_loadable_too(self) -> None:
        config = {**QWEN2, "model_type": "novel", "architectures": ["NovelForCausalLM"]}
        model = name(running(self.CRITIC), config)
        assert model.config_changes["architectures"] == ["NovelForTokenClassification"]


class TestChoices:
    def test_without_a_config_it_stops_and_says_how_to_go_on(self) -> None:
        problem = the_problem(name(running(QWEN2), None))
        assert "no config.json" in problem.message
        assert "--config DIR" in str(problem.hint)
        assert "--weights-only" in str(problem.hint)

    @pytest.mark.parametrize("config", [None, TIED])
    def test_weights_only_keeps_all_names_and_ties_nothing(self, config: dict[str, Any] | None) -> None:
        tensors = {**prefixed(running(TIED), "_orig_mod."), **outline(HEAD, 20, 8)}
        model = name(tensors, config, weights_only=True)
        assert not model.problems
        assert list(model.tensors) == list(tensors)
        assert "nothing was tied" in texts(model)

    def test_stored_names_are_kept_exactly(self) -> None:
        tensors = {**prefixed(running(MOE), "_orig_mod."), **outline("surplus", 3)}
        model = name(tensors, MOE, names="stored")
        assert not model.problems
        assert list(model.tensors) == list(tensors)
        assert model.family is None

    def test_a_directory_without_a_model_is_an_error(self) -> None:
        (problem,) = name(running(QWEN2), QWEN2, names="elsewhere").problems
        assert isinstance(problem, UsageError)


def reference_of(tensors: Mapping[str, Value], config: dict[str, Any] | None = None) -> Checkpoint:
    """A Hugging Face directory of two files, every other tensor in the second."""
    placed = {}
    for number, (key, value) in enumerate(tensors.items()):
        chunk = contiguous_chunk(SourceFile("source", f"model-{number % 2}.safetensors"), 0, value.shape, BF16)
        placed[key] = Tensor(key, BF16, value.shape, (chunk,))
    return Checkpoint("huggingface", "a reference", {"source": Path("/reference")}, placed, config)


class TestReference:
    def follow(self, tensors: Mapping[str, Value], config: dict[str, Any], reference: Checkpoint) -> Model:
        return name(tensors, config, reference, names="/reference")

    @pytest.mark.parametrize("stored", ["packed", "apart"])
    @pytest.mark.parametrize("wanted", ["packed", "apart"])
    def test_experts_are_packed_as_in_the_reference(self, stored: str, wanted: str) -> None:
        forms = {"packed": running(MOE), "apart": dict(name(running(MOE), MOE).tensors)}
        model = self.follow(forms[stored], MOE, reference_of(forms[wanted]))
        assert not model.problems
        assert {key: value.shape for key, value in model.tensors.items()} == {
            key: value.shape for key, value in forms[wanted].items()
        }
        assert model.layout is not None
        assert model.layout == {key: f"model-{number % 2}.safetensors" for number, key in enumerate(forms[wanted])}
        assert model.family == "the reference model /reference"

    def test_names_of_the_running_model_are_followed_too(self) -> None:
        model = self.follow(running(VISION), VISION, reference_of(running(VISION)))
        assert not model.problems
        assert set(model.tensors) == set(running(VISION))

    def test_missing_extra_and_misshapen_names_are_told_at_once(self) -> None:
        other = {**running(QWEN2), **outline("surplus", 3), **outline("model.norm.weight", 9)}
        stored = {**running(QWEN2), **outline("other", 1)}
        unknown, missing, misshapen = self.follow(stored, QWEN2, reference_of(other)).problems
        assert "other" in unknown.message
        assert "surplus" in missing.message
        assert "model.norm.weight: shape [8], expected [9]" in misshapen.message

    @pytest.mark.parametrize("config", [TIED, TIED_VISION], ids=["language", "vision"])
    def test_a_tied_head_is_written_where_the_reference_has_it(self, config: dict[str, Any]) -> None:
        reference = reference_of({**running(config), **outline(HEAD, 20, 8)})
        for stored in (running(config), {**running(config), **outline(HEAD, 20, 8)}):
            model = self.follow(stored, config, reference)
            assert not model.problems
            assert HEAD in model.tensors
            assert HEAD not in model.dropped

    def test_the_config_of_the_reference_serves_where_there_is_none(self) -> None:
        reference = reference_of(running(QWEN2), QWEN2)
        assert not name(running(QWEN2), None, reference, names="/reference").problems

    def test_buffers_that_the_reference_holds_are_kept(self) -> None:
        tensors = {**running(QWEN2), **outline("model.rotary_emb.inv_freq", 2)}
        assert "model.rotary_emb.inv_freq" in self.follow(tensors, QWEN2, reference_of(tensors)).tensors


@pytest.mark.parametrize(
    ("version", "top", "nested", "tied"),
    [
        ("5.24.0", False, True, False),
        ("5.24.0", True, False, True),
        ("4.57.6", False, True, True),
        ("5.0.0", None, True, True),
    ],
)
def test_where_configs_differ_transformers_5_goes_by_the_top(
    version: str, top: bool | None, nested: bool, tied: bool
) -> None:
    config = {"transformers_version": version, "text_config": {"tie_word_embeddings": nested}}
    if top is not None:
        config["tie_word_embeddings"] = top
    assert is_tied(config) == tied
