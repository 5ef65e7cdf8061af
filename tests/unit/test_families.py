"""Naming: wrappers, renames and the comparison with the architecture. Tensors here are outlines only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outlines import (
    EMBEDDING,
    HEAD,
    MOE,
    QWEN2,
    TIED,
    VISION,
    name,
    outline,
    outlines,
    prefixed,
    running,
    texts,
    the_problem,
)
from unshard.dtypes import BF16
from unshard.errors import ModelError, UsageError
from unshard.families import expected_shapes
from unshard.tensors import Computed, SourceFile, Tensor, contiguous_chunk


class TestWrappers:
    def test_wrapper_modules_are_taken_off_anywhere(self) -> None:
        wrapped = {}
        for key, value in running(QWEN2).items():
            inner = key.replace("layers.0.", "layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.")
            wrapped["_orig_mod._fsdp_wrapped_module." + inner] = value
        model = name(wrapped, QWEN2)
        assert not model.problems
        assert list(model.tensors) == list(running(QWEN2))
        assert all(value.name == key for key, value in model.tensors.items())
        assert "_fsdp_wrapped_module, _checkpoint_wrapped_module, _orig_mod" in texts(model)

    @pytest.mark.parametrize("prefix", ["module.", "model.", "module.model.", "policy.", "actor.model."])
    @pytest.mark.parametrize("config", [QWEN2, TIED], ids=["untied", "tied"])
    def test_levels_around_the_model_are_taken_off(self, prefix: str, config: dict[str, Any]) -> None:
        model = name(prefixed(running(config), prefix), config)
        assert not model.problems
        assert list(model.tensors) == list(running(config))
        assert "taken off" in texts(model)

    def test_no_level_is_taken_off_that_the_model_has_itself(self) -> None:
        assert list(name(running(TIED), TIED).tensors) == list(running(TIED))
        unknown = {**TIED, "model_type": "novel", "architectures": ["NovelForCausalLM"]}
        assert list(name(running(TIED), unknown).tensors) == list(running(TIED))

    def test_an_extra_level_of_an_unknown_model_is_told_by_its_head(self) -> None:
        unknown = {**QWEN2, "model_type": "novel"}
        model = name(prefixed(running(QWEN2), "model."), unknown)
        assert list(model.tensors) == list(running(QWEN2))

    def test_names_that_collide_without_wrappers_are_a_problem(self) -> None:
        twice = {**running(QWEN2), **outline("_fsdp_wrapped_module.model.norm.weight", 8)}
        assert "both model.norm.weight" in the_problem(name(twice, QWEN2)).message


class TestRenames:
    def test_packed_experts_are_taken_apart_in_place(self) -> None:
        model = name(running(MOE), MOE)
        assert not model.problems
        names = list(model.tensors)
        at = names.index("model.layers.1.mlp.experts.0.gate_proj.weight")
        assert [key.removeprefix("model.layers.1.mlp.") for key in names[at : at + 10]] == [
            *[f"experts.{expert}.{part}_proj.weight" for expert in range(3) for part in ("gate", "up")],
            *[f"experts.{expert}.down_proj.weight" for expert in range(3)],
            "gate.weight",
        ]
        assert model.tensors["model.layers.1.mlp.experts.2.up_proj.weight"].shape == (5, 8)

    def test_checkpoints_of_transformers_4_and_mixtures_need_nothing(self) -> None:
        apart = dict(name(running(MOE), MOE).tensors)
        assert list(name(apart, MOE).tensors) == list(apart)
        packed = {key: value for key, value in running(MOE).items() if "layers.0" in key}
        mixed = {key: value for key, value in apart.items() if "layers.0" not in key} | packed
        model = name(mixed, MOE)
        assert not model.problems
        assert set(model.tensors) == set(apart)

    def test_transformers_4_defined_experts_one_by_one(self) -> None:
        shapes = expected_shapes({**MOE, "transformers_version": "4.57.6"})
        assert shapes is not None
        names = [key for key in shapes if "layers.0.mlp" in key]
        assert names[:4] == [
            "model.layers.0.mlp.gate.weight",
            "model.layers.0.mlp.experts.0.gate_proj.weight",
            "model.layers.0.mlp.experts.0.up_proj.weight",
            "model.layers.0.mlp.experts.0.down_proj.weight",
        ]
        assert set(shapes) == set(name(running(MOE), MOE).tensors)

    def test_experts_that_do_not_fit_the_config_are_told_once_per_packed_tensor(self) -> None:
        model = name(running(MOE), {**MOE, "num_experts": 4})
        packed, gates = model.problems
        assert "do not fit the model's configuration" in packed.message
        assert "experts.gate_up_proj has shape [3, 10, 8], not [4, 10, 8]" in packed.message
        assert "model.layers.[0-1].mlp.gate.weight (2 tensors): shape [3, 8], expected [4, 8]" in gates.message

    def test_vision_names_become_those_of_the_hub(self) -> None:
        model = name(running(VISION), VISION)
        assert not model.problems
        assert model.family == "Qwen2VLForConditionalGeneration"
        assert "visual.blocks.0.attn.qkv.weight" in model.tensors
        assert "model.layers.0.self_attn.q_proj.bias" in model.tensors

    @pytest.mark.parametrize(("version", "transposed"), [("5.1.0", True), ("4.57.1", False)])
    def test_experts_of_qwen3_vl_moe_are_transposed_back(self, version: str, transposed: bool) -> None:
        sizes = {"num_experts": 3, "moe_intermediate_size": 5, "hidden_size": 8}
        config = {"model_type": "qwen3_vl_moe", "text_config": sizes, "transformers_version": version}
        at = "model.language_model.layers.0.mlp.experts."
        new = outlines({at + "gate_up_proj": (3, 10, 8), at + "down_proj": (3, 8, 5)})
        hub = {at + "gate_up_proj": (3, 8, 10), at + "down_proj": (3, 5, 8)}
        assert {key: value.shape for key, value in name(new, config).tensors.items()} == hub
        assert {key: value.shape for key, value in name(outlines(hub), config).tensors.items()} == hub
        square = {**config, "text_config": {**sizes, "hidden_size": 10}}
        file = SourceFile("source", "f")
        chunk = contiguous_chunk(file, 0, (3, 10, 10), BF16)
        tensor = Tensor(at + "gate_up_proj", BF16, (3, 10, 10), (chunk,))
        result = name({tensor.name: tensor}, square).tensors[tensor.name]
        assert isinstance(result, Tensor)
        assert (result.chunks[0].extent.strides != chunk.extent.strides) == transposed

    def test_a_type_that_no_family_describes_still_merges_and_says_so(self) -> None:
        config = {**MOE, "model_type": "dots1", "architectures": ["Dots1ForCausalLM"]}
        model = name({**running(MOE), **outline("model.layers.9.hnorm.weight", 8)}, config)
        assert not model.problems
        assert model.family is None
        assert "model.layers.0.mlp.experts.2.down_proj.weight" in model.tensors
        warning = next(note for note in model.notes if note.level == "warning")
        assert "no family describes Dots1ForCausalLM" in warning.text

    def test_a_computed_tensor_that_cannot_be_cut_is_a_problem(self) -> None:
        tensors = running(MOE)
        for key, shape in (("model.norm.weight", (8,)), ("model.layers.0.mlp.experts.down_proj", (3, 8, 5))):
            tensors[key] = Computed(key, BF16, shape, "lora_fuse", {}, (), ())
        problem = the_problem(name(tensors, MOE))
        assert "model.layers.0.mlp.experts.down_proj: `lora_fuse` cannot" in problem.message


class TestComparison:
    def test_all_unknown_missing_and_misshapen_names_are_told_at_once(self) -> None:
        tensors = running(QWEN2)
        for layer in range(2):
            value = tensors.pop(f"model.layers.{layer}.self_attn.q_proj.weight")
            tensors[f"model.layers.{layer}.self_attn.q.weight"] = value
        tensors["model.layers.1.mlp.down_proj.weight"] = Tensor("", BF16, (12, 8), ())
        tensors |= outline("surplus.weight", 3)
        unknown, missing, misshapen = name(tensors, QWEN2).problems
        assert "3 tensors unknown to Qwen2ForCausalLM" in unknown.message
        assert "model.layers.[0-1].self_attn.q.weight (2 tensors), close to" in unknown.message
        assert "surplus" in unknown.message
        assert "--names stored" in str(unknown)
        assert "model.layers.[0-1].self_attn.q_proj.weight (2 tensors)" in missing.message
        assert "model.layers.1.mlp.down_proj.weight: shape [12, 8], expected [8, 12]" in misshapen.message

    def test_names_that_are_no_full_grid_are_told_one_by_one(self) -> None:
        tensors = running(MOE)
        del tensors["model.layers.0.input_layernorm.weight"], tensors["model.layers.1.post_attention_layernorm.weight"]
        message = the_problem(name(tensors, MOE)).message
        assert "model.layers.0.input_layernorm.weight" in message
        assert "model.layers.1.post_attention_layernorm.weight" in message

    def test_a_resized_vocabulary_is_told_with_both_numbers(self) -> None:
        tensors = {**running(QWEN2), **outline(EMBEDDING, 24, 8), **outline(HEAD, 24, 8)}
        problem = the_problem(name(tensors, QWEN2))
        assert "vocab_size 20" in problem.message
        assert f"{EMBEDDING} has 24 rows and {HEAD} has 24 rows" in problem.message

    def test_recomputed_buffers_are_left_out_and_named(self) -> None:
        buffers = {
            "model.rotary_emb.inv_freq": (2,),
            "model.layers.0.self_attn.rotary_emb.inv_freq": (2,),
            "model.layers.0.attn.bias": (1, 1, 4, 4),
            "model.layers.0.attn.masked_bias": (),
        }
        model = name({**running(QWEN2), **outlines(buffers)}, QWEN2)
        assert not model.problems
        assert list(model.tensors) == list(running(QWEN2))
        assert set(model.dropped) == set(buffers)
        assert model.notes[-1].tensors == tuple(buffers)

    def test_a_parameter_called_like_a_mask_is_kept(self) -> None:
        config = {**QWEN2, "model_type": "novel"}
        assert "h.0.attn.bias" in name(outline("h.0.attn.bias", 8), config).tensors

    @pytest.mark.parametrize("config", [QWEN2, MOE])
    def test_persistent_buffers_of_an_own_making_are_kept_and_told(self, config: dict[str, Any]) -> None:
        own = ("model.my_scale", "model.layers.0.my_count")
        model = name({**running(config), **outlines(dict.fromkeys(own, (1,)))}, config)
        assert not model.problems
        assert set(own) < set(model.tensors)
        assert [note.tensors for note in model.notes if note.level == "warning"] == [own]

    @pytest.mark.parametrize("stray", ["model.layers.0.self_attn.o_proj.bias", "model.layers.7.mlp.experts.down_proj"])
    def test_parameters_that_the_architecture_does_not_have_are_no_buffers(self, stray: str) -> None:
        assert stray in the_problem(name({**running(MOE), **outline(stray, 1)}, MOE)).message

    @pytest.mark.parametrize("value", [None, "many", -1, True, 1 << 60])
    def test_a_config_without_a_needed_size_is_a_problem(self, value: object) -> None:
        problem = the_problem(name(running(QWEN2), {**QWEN2, "intermediate_size": value}))
        assert "intermediate_size" in problem.message

    @pytest.mark.slow
    def test_a_config_that_asks_for_endless_layers_is_refused(self) -> None:
        problem = the_problem(name(running(QWEN2), {**QWEN2, "num_hidden_layers": 1 << 40}))
        assert "more than 1000000 parameters" in problem.message

    def test_head_counts_of_the_command_line_fill_gaps(self) -> None:
        config = {key: value for key, value in QWEN2.items() if key != "num_attention_heads"}
        problem = the_problem(name(running(QWEN2), config))
        assert "num_attention_heads" in problem.message
        assert "--num-attention-heads" in str(problem.hint)
        model = name(running(QWEN2), config, attention_heads=2)
        assert not model.problems
        assert model.config_changes == {"num_attention_heads": 2}

    def test_head_counts_that_contradict_the_config_are_an_error(self) -> None:
        (problem,) = name(running(QWEN2), QWEN2, attention_heads=4, key_value_heads=1).problems
        assert isinstance(problem, UsageError)
        assert problem.message == "--num-attention-heads 4 contradicts config.json, which says num_attention_heads 2"


def test_shapes_are_expected_of_known_families_only() -> None:
    assert expected_shapes(None) is None
    assert expected_shapes({**QWEN2, "model_type": "novel"}) is None
    assert expected_shapes({**QWEN2, "architectures": ["Qwen2ForSomethingElse"]}) is None
    with pytest.raises(ModelError, match="vocab_size"):
        expected_shapes({key: value for key, value in QWEN2.items() if key != "vocab_size"})


def test_tensors_keep_their_places_under_their_new_names() -> None:
    tensors = running(QWEN2)
    value = tensors["model.norm.weight"]
    assert isinstance(value, Tensor)
    chunk = contiguous_chunk(SourceFile("source", "rank_0.pt"), 64, (8,), BF16, rank=0)
    tensors["model.norm.weight"] = replace(value, chunks=(chunk,))
    result = name(prefixed(tensors, "module."), QWEN2).tensors["model.norm.weight"]
    assert result == replace(value, chunks=(chunk,))
