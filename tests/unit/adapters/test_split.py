"""Adapters told apart and described, without PEFT: what cannot be known is an error, what is doubtful is said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from unshard.adapters import Split, fuse_all, split
from unshard.checkpoint import Checkpoint
from unshard.dtypes import F32, U8, DType
from unshard.options import MergeOptions
from unshard.tensors import SourceFile, Tensor, contiguous_chunk

META = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}
Q = "model.layers.0.self_attn.q_proj"
LIVE = "base_model.model."


def tensor(name: str, shape: tuple[int, ...], dtype: DType = F32) -> Tensor:
    return Tensor(name, dtype, shape, (contiguous_chunk(SourceFile("source", "file"), 0, shape, dtype),))


def peft_model(
    modules: Mapping[str, int], plain: tuple[str, ...] = (), adapter: str = "default", prefix: str = LIVE
) -> dict[str, tuple[int, ...]]:
    """Live names → shapes: linear layers of 16 inputs and 12 outputs; module → rank, and modules without an adapter."""
    shapes: dict[str, tuple[int, ...]] = {}
    for module, rank in modules.items():
        shapes[f"{prefix}{module}.base_layer.weight"] = (12, 16)
        shapes[f"{prefix}{module}.lora_A.{adapter}.weight"] = (rank, 16)
        shapes[f"{prefix}{module}.lora_B.{adapter}.weight"] = (12, rank)
    return shapes | {f"{prefix}{module}.weight": (12, 16) for module in plain}


def divide(shapes: Mapping[str, tuple[int, ...]], told: Mapping[str, Any] | None = META, /, **options: Any) -> Split:
    config = options.pop("config", None)
    tensors = {name: tensor(name, shape) for name, shape in shapes.items()}
    checkpoint = Checkpoint("test", "a test", {}, tensors, config=config, adapter=told)
    return split(checkpoint, tensors, MergeOptions(**options))


def problems(result: Split) -> str:
    return "\n".join(str(problem) for problem in result.problems)


def notes(result: Split) -> str:
    return "\n".join(note.text for note in result.notes)


# -- the base model ----------------------------------------------------------------------------------------------------


def test_a_model_without_adapters_passes_through() -> None:
    shapes = {"model.embed_tokens.weight": (8, 4), "lm_head.weight": (8, 4)}
    result = divide(shapes, None)
    assert list(result.base) == list(shapes)
    assert (result.adapters, result.problems, result.notes) == ((), (), ())


def test_modules_called_like_peft_wrappers_stay_in_models_without_adapters() -> None:
    names = ["encoder.base_layer.weight", "encoder.original_module.weight", "prompt.ia3_like.weight"]
    assert list(divide(dict.fromkeys(names, (2, 2)), None).base) == names


def test_a_peft_model_without_adapters_loses_its_prefix() -> None:
    assert list(divide({f"{LIVE}{Q}.weight": (2, 2)}, None).base) == [f"{Q}.weight"]


@pytest.mark.parametrize(
    "around", ["", "module.", "pretrained_model.", "module.pretrained_model.", "model.", "_forward_module.actor."]
)
def test_what_lies_around_the_peft_model_is_taken_off(around: str) -> None:
    result = divide(peft_model({Q: 4}, prefix=around + LIVE))
    assert list(result.base) == [f"{Q}.weight"]
    assert list(result.adapters[0].tensors) == [f"{LIVE}{Q}.lora_A.weight", f"{LIVE}{Q}.lora_B.weight"]


def test_two_tensors_of_one_base_name_are_an_error() -> None:
    result = divide(peft_model({Q: 4}) | {f"{LIVE}{Q}.weight": (12, 16)})
    assert f"are both `{Q}.weight`" in problems(result)


def test_verdict_says_that_the_base_does_not_contain_the_adapter() -> None:
    """A merged LoRA run that is the base model again, without a word."""
    assert "The base weights do not contain the adapter" in notes(divide(peft_model({Q: 4})))
    assert "do not contain" not in notes(divide(peft_model({Q: 4}), fuse_lora=True))
    assert "do not contain" not in notes(divide(peft_model({Q: 4}), adapter_only=True))


def test_provenance_of_the_base_is_told() -> None:
    """Does this merge with the base or with my SFT model?"""
    told = META | {"peft_type": "LORA", "target_modules": ["q_proj"], "base_model_name_or_path": "me/my-sft"}
    assert "those that training froze under the adapter" in notes(divide(peft_model({Q: 4})))
    assert "me/my-sft" in notes(divide(peft_model({Q: 4}), told))


def test_whole_modules_are_named_as_untrained_in_the_base() -> None:
    shapes = peft_model({Q: 4}) | {
        f"{LIVE}score.original_module.weight": (1, 16),
        f"{LIVE}score.modules_to_save.default.weight": (1, 16),
    }
    result = divide(shapes)
    assert list(result.base) == [f"{Q}.weight", "score.weight"]
    assert result.adapters[0].config["modules_to_save"] == ["score"]
    assert any(note.tensors == ("score",) and note.level == "warning" for note in result.notes)


# -- alpha -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [None, {"r": 4}, {"r": 4, "lora_alpha": 0}, {"r": 4, "lora_alpha": None}])
def test_alpha_is_never_guessed(told: Mapping[str, Any] | None) -> None:
    """An adapter with "lora_alpha": 0 has no effect."""
    result = divide(peft_model({Q: 4}), told)
    assert "alpha is not in the shards" in problems(result)
    assert "--lora-alpha N" in problems(result)
    assert "lora_alpha" not in result.adapters[0].config or result.adapters[0].config["lora_alpha"] != 0


def test_zero_is_called_what_it_is() -> None:
    assert "says 0, which some trainers write for unknown" in problems(
        divide(peft_model({Q: 4}), META | {"lora_alpha": 0})
    )


def test_given_alpha_goes_first() -> None:
    for told in (None, META, META | {"lora_alpha": 0}):
        result = divide(peft_model({Q: 4}), told, lora_alpha=32.0)
        assert result.problems == ()
        assert result.adapters[0].config["lora_alpha"] == 32


def test_given_alpha_of_zero_is_refused() -> None:
    assert "has no effect" in problems(divide(peft_model({Q: 4}), META, lora_alpha=0.0))


def test_given_alpha_without_adapter_is_said() -> None:
    assert "there is no LoRA adapter" in notes(divide({"a.weight": (2, 2)}, None, lora_alpha=8.0))


# -- what was recorded -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stated", ["CAUSAL_LM", "TaskType.CAUSAL_LM", {"value": "CAUSAL_LM"}])
def test_task_type_is_read_however_it_was_written(stated: object) -> None:
    """'str' object has no attribute 'value'."""
    result = divide(peft_model({Q: 4}), META | {"task_type": stated})
    assert result.problems == ()
    assert result.adapters[0].config["task_type"] == "CAUSAL_LM"


@pytest.mark.parametrize(
    ("architecture", "task"),
    [("Qwen2ForCausalLM", "CAUSAL_LM"), ("Qwen2ForTokenClassification", "TOKEN_CLS"), ("Qwen2Model", None)],
)
def test_task_type_follows_the_architecture(architecture: str, task: str | None) -> None:
    result = divide(peft_model({Q: 4}), {"lora_alpha": 8}, config={"architectures": [architecture]})
    assert result.adapters[0].config["task_type"] == task


def test_rank_that_contradicts_the_shapes_is_an_error() -> None:
    assert "says r = 8, but the adapter's tensors have rank 4" in problems(divide(peft_model({Q: 4}), META | {"r": 8}))


def test_recorded_config_is_kept_but_for_what_the_tensors_contradict() -> None:
    told = META | {
        "peft_type": "LORA",
        "r": 16,
        "lora_dropout": 0.05,
        "target_modules": ["q_proj", "k_proj"],
        "use_dora": True,
        "a_field_of_tomorrow": 1,
    }
    result = divide(peft_model({Q: 4}, plain=("model.layers.0.self_attn.k_proj",)), told)
    config = result.adapters[0].config
    assert result.problems == ()
    assert (config["r"], config["target_modules"], config["use_dora"]) == (4, ["q_proj"], False)
    assert (config["lora_dropout"], config["a_field_of_tomorrow"], config["inference_mode"]) == (0.05, 1, True)
    corrected = [note.text for note in result.notes if "corrected" in note.text]
    assert [text.split()[1] for text in corrected] == ["r", "target_modules", "use_dora"]


def test_fields_that_peft_cannot_load_are_left_out() -> None:
    told = META | {"peft_type": "LORA", "runtime_config": {"ephemeral_gpu_offload": False}}
    assert "runtime_config" not in divide(peft_model({Q: 4}), told).adapters[0].config


def test_recorded_config_that_fits_is_kept_silently() -> None:
    told = META | {"peft_type": "LORA", "target_modules": r".*\.(q|v)_proj", "rank_pattern": {"layers.1": 9}}
    result = divide(peft_model({Q: 4}, plain=("model.layers.0.mlp.up_proj",)), told)
    assert result.adapters[0].config["target_modules"] == r".*\.(q|v)_proj"
    assert "corrected" not in notes(result)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"r": "four"}, "r is 'four', expected a number"),
        ({"r": -1}, "r is -1.0, expected a positive integer"),
        ({"lora_alpha": [8]}, "lora_alpha is [8], expected a number"),
        ({"lora_alpha": 10**400}, "expected a number"),
        ({"peft_type": "LOHA"}, "adapters of type LOHA are not supported"),
        ({"peft_type": "LORA", "rank_pattern": {"q": "x"}}, "rank_pattern"),
        ({"peft_type": "LORA", "modules_to_save": "score"}, "modules_to_save"),
        ({"target_modules": ["q_proj", 1]}, "expected a list of names"),
        ({"peft_type": "LORA", "r": 8, "rank_pattern": {"(a+)+$": 4}}, "repeats too much"),
        ({"peft_type": "LORA", "r": 8, "rank_pattern": {"(": 4}}, "no regular expression"),
        ({"peft_type": "LORA", "alpha_pattern": {"((.*)*)*x": 4}}, "repeats too much"),
    ],
)
def test_senseless_records_are_errors(told: Mapping[str, Any], message: str) -> None:
    assert message in problems(divide(peft_model({Q: 4}), META | told))


# -- modules, ranks ----------------------------------------------------------------------------------------------------


def layer(number: int, name: str) -> str:
    return f"model.layers.{number}.{name}"


def test_targets_are_named_shortly_only_where_that_is_exact() -> None:
    shapes = peft_model(
        {layer(0, "q_proj"): 4, layer(1, "q_proj"): 4, layer(1, "v_proj"): 4}, plain=(layer(0, "v_proj"),)
    )
    assert divide(shapes).adapters[0].config["target_modules"] == [layer(1, "v_proj"), "q_proj"]


def test_targets_are_whole_paths_where_a_container_is_called_alike() -> None:
    """PEFT refuses a target that is a whole block: `blocks.0` beside the linear layer `merger.mlp.0`."""
    shapes = peft_model({"visual.merger.mlp.0": 4, "visual.blocks.0.attn.qkv": 4}, plain=("visual.blocks.0.mlp.up",))
    assert divide(shapes).adapters[0].config["target_modules"] == ["qkv", "visual.merger.mlp.0"]


def test_modules_trained_whole_that_were_not_saved_are_told() -> None:
    """Savers that keep only names with `lora_` lose `modules_to_save`, and PEFT cannot load a config that names it."""
    shapes = {name: shape for name, shape in peft_model({Q: 4}).items() if "lora_" in name}
    told = META | {"peft_type": "LORA", "target_modules": [Q], "modules_to_save": ["lm_head"]}
    result = divide(shapes, told)
    assert result.adapters[0].config["modules_to_save"] is None
    assert "modules_to_save corrected from ['lm_head'] to None: the checkpoint does not hold them" in notes(result)


def test_targets_are_whole_paths_where_no_base_is_known() -> None:
    shapes = {name: shape for name, shape in peft_model({Q: 4}).items() if "base_layer" not in name}
    result = divide(shapes)
    assert result.base == {}
    assert result.adapters[0].config["target_modules"] == [Q]
    assert "do not contain" not in notes(result)


def test_ranks_that_differ_are_told_per_module() -> None:
    shapes = peft_model({layer(0, "q_proj"): 4, layer(1, "q_proj"): 2, layer(0, "v_proj"): 8, layer(1, "v_proj"): 8})
    config = divide(shapes).adapters[0].config
    assert config["r"] == 4
    assert config["rank_pattern"] == {layer(1, "q_proj"): 2, "v_proj": 8}


# -- damage and strangers ----------------------------------------------------------------------------------------------


def test_empty_adapters_are_refused() -> None:
    """adapter_model.safetensors of 40 bytes."""
    shapes = {name: (0,) if "lora_" in name else shape for name, shape in peft_model({Q: 4}).items()}
    assert "the adapter is empty" in problems(divide(shapes))


def test_a_half_is_missing() -> None:
    shapes = {name: shape for name, shape in peft_model({Q: 4}).items() if "lora_B" not in name}
    assert f"`{LIVE}{Q}` has only lora_A.weight" in problems(divide(shapes))


def test_halves_of_unlike_rank() -> None:
    shapes = peft_model({Q: 4}) | {f"{LIVE}{Q}.lora_B.default.weight": (12, 3)}
    assert "lora_A [4, 16], lora_B [12, 3]" in problems(divide(shapes))


@pytest.mark.parametrize(
    ("name", "method"),
    [
        (f"{LIVE}{Q}.hada_w1_a.default", "LoHa"),
        (f"{LIVE}{Q}.lokr_w1.default", "LoKr"),
        (f"{LIVE}{Q}.ia3_l.default", "IA3"),
        (f"{LIVE}{Q}.lora_E.default", "AdaLoRA"),
        (f"{LIVE}{Q}.lora_diag.default", "KaSA"),
        (f"{LIVE}{Q}.lora_arrow.router.weight", "Arrow"),
        (f"{LIVE}{Q}.lora_novelty.default", "an unknown variant of LoRA"),
        ("prompt_encoder.default.embedding.weight", "prompt tuning"),
    ],
)
def test_other_methods_are_named(name: str, method: str) -> None:
    result = divide(peft_model({Q: 4}) | {name: (4, 4)})
    assert method in problems(result)
    assert name in problems(result)


@pytest.mark.parametrize(
    ("key", "value"),
    [("alora_invocation_tokens", [1]), ("use_qalora", True), ("use_bdlora", {}), ("velora_config", {"a": 1})],
)
def test_variants_that_cannot_be_fused_are_named(key: str, value: object) -> None:
    told = META | {"peft_type": "LORA", "target_modules": ["q_proj"], key: value}
    fused = fuse_all(divide(peft_model({Q: 4}), told, fuse_lora=True))
    assert bool(fused.problems) == bool(value)
    assert all("cannot be fused" in problem.message for problem in fused.problems)


def test_rows_need_their_numbers() -> None:
    shapes = peft_model({Q: 4}) | {
        f"{LIVE}model.embed_tokens.token_adapter.base_layer.weight": (8, 4),
        f"{LIVE}model.embed_tokens.token_adapter.trainable_tokens_delta.default": (2, 4),
    }
    assert "trainable_token_indices" in problems(divide(shapes))


def test_packs_of_experts_without_a_base_need_the_config() -> None:
    experts = f"{LIVE}model.layers.0.mlp.experts"
    shapes = {f"{experts}.lora_A.default.weight": (16, 8), f"{experts}.lora_B.default.weight": (8, 16)}
    assert "nothing tells which" in problems(divide(shapes))
    told = META | {"peft_type": "LORA", "target_modules": [], "target_parameters": ["experts.down_proj"]}
    assert divide(shapes, told).problems == ()


# -- fusing ------------------------------------------------------------------------------------------------------------


def fusion_problems(result: Split) -> str:
    assert result.problems == ()
    return "\n".join(str(problem) for problem in fuse_all(result).problems)


def test_fusing_needs_an_adapter() -> None:
    assert "holds no LoRA adapter" in fusion_problems(divide({"a.weight": (2, 2)}, None, fuse_lora=True))


def test_fusing_needs_a_base() -> None:
    shapes = {name: shape for name, shape in peft_model({Q: 4}).items() if "base_layer" not in name}
    assert "there are no base weights" in fusion_problems(divide(shapes, fuse_lora=True))


def test_fusing_needs_to_know_which_adapter() -> None:
    shapes = peft_model({Q: 4}) | peft_model({Q: 4}, adapter="second")
    assert "'default', 'second'" in fusion_problems(divide(shapes, fuse_lora=True))


def test_base_weights_that_are_missing_are_listed() -> None:
    shapes = peft_model({Q: 4, layer(1, "v_proj"): 4})
    del shapes[f"{LIVE}{layer(1, 'v_proj')}.base_layer.weight"]
    assert f"`{layer(1, 'v_proj')}.weight`" in fusion_problems(divide(shapes, fuse_lora=True))


def test_weights_of_another_shape_are_listed() -> None:
    shapes = peft_model({Q: 4}) | {f"{LIVE}{Q}.base_layer.weight": (12, 17)}
    assert f"`{Q}.weight` [12, 17]: the adapter is for [12, 16]" in fusion_problems(divide(shapes, fuse_lora=True))


def test_quantised_weights_are_refused() -> None:
    names = {
        name: tensor(name, shape, U8 if "base" in name.split(".")[-2] else F32)
        for name, shape in peft_model({Q: 4}).items()
    }
    result = split(Checkpoint("test", "a test", {}, names, adapter=META), names, MergeOptions(fuse_lora=True))
    assert "quantised" in fusion_problems(result)


def test_a_bias_without_a_place_is_listed() -> None:
    shapes = peft_model({Q: 4}) | {f"{LIVE}{Q}.lora_B.default.bias": (12,)}
    assert f"`{Q}.bias`" in fusion_problems(divide(shapes, fuse_lora=True))


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ({"model_type": "llama"}, False),
        ({"model_type": "gemma2"}, True),
        ({"model_type": "gemma2", "tie_word_embeddings": False}, False),
        ({"model_type": "qwen2_vl", "text_config": {"tie_word_embeddings": True}}, True),
    ],
)
def test_embeddings_are_tied_as_the_families_say(config: Mapping[str, Any], tied: bool) -> None:
    assert divide(peft_model({Q: 4}), config=config).tied is tied


def test_an_adapter_on_one_of_two_tied_modules_needs_a_decision() -> None:
    shapes = {
        f"{LIVE}model.embed_tokens.base_layer.weight": (8, 16),
        f"{LIVE}model.embed_tokens.lora_embedding_A.default": (4, 8),
        f"{LIVE}model.embed_tokens.lora_embedding_B.default": (16, 4),
        f"{LIVE}lm_head.weight": (8, 16),
    }
    config = {"tie_word_embeddings": True}
    assert "no longer the same" in problems(divide(shapes, config=config, fuse_lora=True))
    assert divide(shapes, config=config, fuse_lora=True, tie_embeddings=False).problems == ()
    assert divide(shapes, config=config).problems == ()
