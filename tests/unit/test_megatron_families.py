"""Dense families: a random model of transformers through Megatron's files and back, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: E402

from golden.make.models import randomize  # noqa: E402
from megatron.checking import ToMegatron, merge_and_compare, random_model  # noqa: E402
from megatron.from_hf import gemma, glm4, llama, mimo, phi3, starcoder2  # noqa: E402

pytestmark = pytest.mark.torch

TEXT = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 22,
    "vocab_size": 43,
    "num_hidden_layers": 4,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
GROUPED = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
ONE_GROUP = {"num_key_value_heads": 1}
NO_GROUPS = {"num_key_value_heads": 4}
TIED = {"tie_word_embeddings": True}
WIDE = {"head_dim": 12}
BIASED = {"attention_bias": True, "mlp_bias": True}
VISION = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 20,
          "image_size": 28, "patch_size": 7, "vision_use_head": False}  # fmt: skip

DENSE: dict[str, tuple[ToMegatron, list[dict[str, Any]]]] = {
    "llama": (llama.to_megatron, [{}, GROUPED, ONE_GROUP, NO_GROUPS, TIED, WIDE, BIASED]),
    "mistral": (llama.to_megatron, [WIDE, {**GROUPED, **TIED}]),
    "ministral": (llama.to_megatron, [WIDE]),
    "ministral3": (llama.to_megatron, [WIDE, {"head_dim": 8}]),
    "qwen2": (llama.to_megatron, [{}, GROUPED, ONE_GROUP, TIED]),
    "qwen3": (llama.to_megatron, [WIDE, {**GROUPED, "head_dim": 8, **TIED}, {"head_dim": 6, "attention_bias": True}]),
    "phi3": (phi3.to_megatron, [{}, GROUPED, ONE_GROUP, TIED]),
    "glm4": (glm4.to_megatron, [WIDE, {**GROUPED, "head_dim": 8}, {"head_dim": 8, "attention_bias": False, **TIED}]),
    "gemma": (gemma.to_megatron, [{**WIDE, **TIED}, {**ONE_GROUP, "head_dim": 8}]),
    "gemma2": (gemma.to_megatron, [{**WIDE, **TIED}, {**GROUPED, "head_dim": 8}]),
    "gemma3_text": (gemma.to_megatron, [{**WIDE, **TIED}, {**GROUPED, "head_dim": 8}]),
    "starcoder2": (starcoder2.to_megatron, [TIED, {**GROUPED, "tie_word_embeddings": False}, {"use_bias": False}]),
}
"""By model type: the independent script, and settings over `TEXT`."""

CENTRED = ("gemma", "gemma2", "gemma3_text")

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2_pp2": {"tp": 2, "pp": 2},
    "pp2_vpp2_local": {"pp": 2, "vpp": 2, "te": False},
    "dist_tp2_pp2": {"write": "torch_dist", "tp": 2, "pp": 2},
    "dist_local_layers": {"write": "torch_dist", "te": False, "homogeneous": False},
}

CASES = [
    pytest.param(model_type, settings, layout, id=f"{model_type}-{number}-{layout}")
    for model_type, (_, configs) in DENSE.items()
    for number, settings in enumerate(configs)
    for place, layout in enumerate(LAYOUTS)
    if place == number % 4 or (number == 0 and place == 3)
]


def report(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed, on one line."""
    return " ".join(capsys.readouterr().out.split())


def arguments(config: Any, **more: Any) -> dict[str, Any]:
    """What Megatron-LM records of such a model."""
    text = config.get_text_config()
    return {
        "num_layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "ffn_hidden_size": text.intermediate_size,
        "num_attention_heads": text.num_attention_heads,
        "group_query_attention": True,
        "num_query_groups": text.num_key_value_heads,
        "kv_channels": getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        "swiglu": True,
        "padded_vocab_size": 48,
        "apply_layernorm_1p": text.model_type in CENTRED,
        **more,
    }


def build(model_type: str, settings: dict[str, Any], **more: Any) -> Any:
    return random_model(transformers.CONFIG_MAPPING[model_type](**{**TEXT, **settings}), **more)


@pytest.mark.parametrize(("model_type", "settings", "layout"), CASES)
def test_what_megatron_stores_becomes_the_file_of_save_pretrained(
    model_type: str, settings: dict[str, Any], layout: str, tmp_path: Path
) -> None:
    model = build(model_type, settings)
    merge_and_compare(
        model, DENSE[model_type][0], tmp_path, args=arguments(model.config), padded_vocab_size=48, **LAYOUTS[layout]
    )


def snap_norms(model: Any) -> Any:
    """Round the weights of all norms to multiples of 1/64, so that adding 1 and taking it away is exact."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.copy_((parameter * 64).round() / 64)
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", *CENTRED])
def test_norms_that_megatron_uses_otherwise_are_computed(
    model_type: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = snap_norms(build(model_type, {"head_dim": 8}, dtype=getattr(torch, dtype)))
    to_megatron, centred = DENSE[model_type][0], model_type not in CENTRED

    def shifted(state: Any, config: Any) -> Any:
        return gemma.shift_norms(to_megatron(state, config), -1 if centred else 1)

    args, logits = arguments(model.config, apply_layernorm_1p=centred), dtype == "float32"
    merge_and_compare(model, shifted, tmp_path, tp=2, args=args, padded_vocab_size=48, logits=logits)
    assert "computed in float32" in report(capsys)


def test_gemmas_norms_are_copied_where_nothing_is_recorded_and_the_report_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build("gemma2", WIDE)
    merge_and_compare(model, gemma.to_megatron, tmp_path, write="torch_dist")
    assert "training did not record apply_layernorm_1p" in report(capsys)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layers", [0, 2])
def test_mimo_with_layers_of_further_tokens_and_without(
    layers: int, layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = mimo.MiMoForCausalLM(mimo.MiMoConfig(**TEXT, num_nextn_predict_layers=layers)).eval()
    randomize(model, 0)
    model.config.dtype = torch.float32
    args = arguments(model.config, mtp_num_layers=layers or None)
    merge_and_compare(model, mimo.to_megatron, tmp_path, args=args, padded_vocab_size=48, **LAYOUTS[layout])
    assert "MTP" not in report(capsys)


def test_mimo_trained_without_its_layers_of_further_tokens_is_said_to_lack_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = mimo.MiMoForCausalLM(mimo.MiMoConfig(**TEXT)).eval()
    model.config.num_nextn_predict_layers = 1
    args = arguments(model.config)
    merge_and_compare(model, llama.to_megatron, tmp_path, args=args, padded_vocab_size=48, logits=False)
    assert "the checkpoint has no MTP layers" in report(capsys)


@pytest.mark.parametrize("layout", ["tp2_pp2", "dist_tp2_pp2"])
def test_gemma3_with_its_vision_tower(layout: str, tmp_path: Path) -> None:
    text = {**TEXT, **WIDE, **TIED, "num_hidden_layers": 2}
    config = transformers.Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
    config.architectures = ["Gemma3ForConditionalGeneration"]
    model = random_model(config)
    # As from_pretrained remembers them: with the prefixes that files of the hub have.
    model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    dims = {"multi_modal_projector.proj.weight": 0}
    merge_and_compare(
        model, gemma.vision_to_megatron, tmp_path, args=arguments(config), padded_vocab_size=48, dims=dims,
        **LAYOUTS[layout],
    )  # fmt: skip


def build_critic(ending: str = "ForTokenClassification", **settings: Any) -> Any:
    """A model with one score for each token, or for the whole, whose head has no bias."""
    config = transformers.Qwen2Config(**TEXT, num_labels=1, token_classification_bias=False, **settings)
    config.architectures = [f"Qwen2{ending}"]
    return random_model(config)


def critic_to_megatron(state: Any, config: Any) -> Any:
    """As verl and Megatron-Bridge do: a layer to one number in the place of the output layer."""
    return {**llama.to_megatron(state, config), "output_layer.weight": state["score.weight"]}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ending", ["ForTokenClassification", "ForSequenceClassification"])
def test_the_head_of_a_value_model_becomes_its_score(ending: str, layout: str, tmp_path: Path) -> None:
    model = build_critic(ending)
    model.config.pad_token_id = 0
    args = arguments(model.config)
    options = ("--is-value-model",)
    merge_and_compare(
        model, critic_to_megatron, tmp_path, args=args, padded_vocab_size=48, options=options, **LAYOUTS[layout]
    )


@pytest.mark.parametrize("options", [(), ("--is-value-model",)])
def test_a_value_model_beside_the_config_of_its_language_model_becomes_loadable(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_critic("ForSequenceClassification")
    base = tmp_path / "base"
    transformers.Qwen2Config(**{**TEXT, **TIED}, architectures=["Qwen2ForCausalLM"]).save_pretrained(base)
    merge_and_compare(
        model, critic_to_megatron, tmp_path, args=arguments(model.config), padded_vocab_size=48, tp=2, logits=False,
        options=("--config", str(base), *options),
    )  # fmt: skip
    text = report(capsys)
    assert "output_layer.weight has fewer rows than the embedding: it is the head of a value model" in text
    assert "architectures becomes Qwen2ForSequenceClassification (was Qwen2ForCausalLM)" in text
    config = json.loads((tmp_path / "output" / "config.json").read_text())
    assert (config["num_labels"], config["vocab_size"]) == (1, 43)


def test_a_token_classifier_without_bias_says_so_in_its_config(tmp_path: Path) -> None:
    model = build_critic()
    base = tmp_path / "base"
    architecture = ["Qwen2ForTokenClassification"]
    transformers.Qwen2Config(**TEXT, num_labels=1, architectures=architecture).save_pretrained(base)
    merge_and_compare(
        model, critic_to_megatron, tmp_path, args=arguments(model.config), padded_vocab_size=48, tp=2,
        options=("--config", str(base)),
    )  # fmt: skip
    assert json.loads((tmp_path / "output" / "config.json").read_text())["token_classification_bias"] is False


def test_a_language_model_is_not_taken_for_a_value_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError):
        merge_and_compare(build("qwen2", {}), llama.to_megatron, tmp_path, options=("--is-value-model",))
    assert "there is no value head" in capsys.readouterr().err


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"num_attention_heads": 8}, "num_attention_heads is 4 in training and num_attention_heads 8 in config"),
    "layers": ({"num_hidden_layers": 5}, "num_layers is 4 in training and num_hidden_layers 5 in config.json"),
    "vocabulary": ({"vocab_size": 99}, "padded_vocab_size is 48 in training, less than vocab_size 99 in config.json"),
    "groups": ({"num_key_value_heads": 4}, "num_query_groups is 2 in training and num_key_value_heads 4"),
    "width": ({"intermediate_size": 23}, "ffn_hidden_size is 22 in training and intermediate_size 23"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_config_that_contradicts_what_training_recorded_is_refused(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, expected = WRONG[case]
    assert expected in refuse(changes, tmp_path, capsys, args=True)


SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"num_attention_heads": 8}, "rows, where the config makes it 2 x (16 + 4 + 4) = 48"),
    "layers": ({"num_hidden_layers": 5}, "model.layers.4.self_attn.q_proj.weight"),
    "vocabulary": ({"vocab_size": 99}, "config.json says vocab_size 99, but model.embed_tokens.weight has 48 rows"),
    "width": ({"intermediate_size": 23}, "mlp.gate_proj.weight (4 tensors): shape [22, 32], expected [23, 32]"),
}


@pytest.mark.parametrize("case", SHAPES)
def test_a_config_that_contradicts_the_shapes_is_refused_where_nothing_is_recorded(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, expected = SHAPES[case]
    assert expected in refuse(changes, tmp_path, capsys, args=False)


def test_all_names_that_no_rule_knows_are_told_with_those_they_resemble(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def strange(state: Any, config: Any) -> Any:
        full = llama.to_megatron(state, config)
        renamed = {name.replace("linear_proj", "linear_projection"): value for name, value in full.items()}
        return {**renamed, "some.adviser.weight": torch.zeros(2)}

    with pytest.raises(AssertionError):
        merge_and_compare(build("llama", {}), strange, tmp_path, te=False)
    text = capsys.readouterr().err
    assert "5 tensors unknown to the rules for 'llama' models" in text
    line = "decoder.layers.[0-3].self_attention.linear_projection.weight (4 tensors), close to decoder.layers.{layer}."
    assert f"{line}self_attention.linear_proj.weight" in text
    assert "some.adviser.weight" in text
    assert "--map FILE" in text


def refuse(changes: dict[str, Any], place: Path, capsys: pytest.CaptureFixture[str], *, args: bool) -> str:
    """The error of merging a Llama beside a config with these changes; nothing may be written."""
    model = build("llama", {})
    transformers.LlamaConfig(**{**TEXT, **changes}, architectures=["LlamaForCausalLM"]).save_pretrained(place / "wrong")
    recorded = arguments(model.config) if args else None
    with pytest.raises(AssertionError):
        merge_and_compare(
            model, llama.to_megatron, place, args=recorded, padded_vocab_size=48, tp=2,
            options=("--config", str(place / "wrong")),
        )  # fmt: skip
    assert not (place / "output").exists()
    return capsys.readouterr().err
