"""Families and renames against transformers itself: names, shapes and order, on the meta device."""

from __future__ import annotations

import contextlib
import json
import warnings
from typing import Any

import pytest

from unshard.dtypes import F32
from unshard.families import FAMILIES, expected_shapes, name_model
from unshard.families.transformers5 import RENAMES
from unshard.model_config import TIED_BY_DEFAULT
from unshard.options import MergeOptions
from unshard.tensors import Tensor

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="the oracle is transformers 5"),
]

SMALL = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 70}
TEXT = {**SMALL, "vocab_size": 37, "num_hidden_layers": 2, "pad_token_id": 0}
ODD = {
    "hidden_size": 70,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "intermediate_size": 33,
    "vocab_size": 259,
}
MOE = {"num_experts": 3, "moe_intermediate_size": 10}

LLAMA = [
    {},
    {"attention_bias": True, "mlp_bias": True},
    {"head_dim": 20},
    {"tie_word_embeddings": True},
    ODD,
    {"num_labels": 1},
    {"num_key_value_heads": 4},
]
QWEN_MOE = [
    MOE,
    {**MOE, "mlp_only_layers": [0]},
    {**MOE, "decoder_sparse_step": 2, "num_hidden_layers": 5},
    {**MOE, "tie_word_embeddings": True},
    {**MOE, "num_experts": 0},
]

EXPERTS = {"n_routed_experts": 3, "moe_intermediate_size": 10, "n_shared_experts": 2, "first_k_dense_replace": 1}
LATENT = {
    **EXPERTS, "q_lora_rank": 14, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10,
    "num_key_value_heads": 4,
}  # fmt: skip
DEEPSEEK = [
    LATENT,
    {**LATENT, "q_lora_rank": None, "n_shared_experts": 1},
    {**LATENT, "attention_bias": True, "first_k_dense_replace": 0, "tie_word_embeddings": True},
]

GEMMA = [{}, {"head_dim": 20, "num_key_value_heads": 1}, {"tie_word_embeddings": False}, {"attention_bias": True}]

HYBRID = {
    "num_hidden_layers": 4, "head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 6, "linear_value_head_dim": 10,
}  # fmt: skip
SHARED = {**MOE, "shared_expert_intermediate_size": 14}
NEXT = [
    {**HYBRID, **SHARED},
    {**HYBRID, **SHARED, "attention_bias": True, "mlp_only_layers": [1], "layer_types": ["full_attention"] * 4},
]
PLAIN_HYBRID = [HYBRID, {**HYBRID, "tie_word_embeddings": True, "num_hidden_layers": 5}]

DECODERS: dict[str, list[dict[str, Any]]] = {
    "llama": LLAMA,
    "mistral": [{}, {"head_dim": 20}, {"tie_word_embeddings": True}, {"num_labels": 3}],
    "qwen2": [{}, ODD, {"tie_word_embeddings": True}, {"num_labels": 1}],
    "qwen3": [{}, {"head_dim": 20}, {"attention_bias": True}, {"tie_word_embeddings": True}],
    "ministral": [{"head_dim": 20}, {"head_dim": 12, "tie_word_embeddings": True}],
    "ministral3": [{}, {"head_dim": 20, "num_labels": 1}],
    "phi3": [{}, ODD, {"num_key_value_heads": 4}, {"tie_word_embeddings": True}],
    "glm4": [{}, {"attention_bias": False, "head_dim": 20}, {"tie_word_embeddings": True}],
    "gemma": GEMMA,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "mixtral": [{"num_local_experts": 3}, {"num_local_experts": 2, "head_dim": 20, "tie_word_embeddings": True}],
    "qwen2_moe": [*[{**case, "shared_expert_intermediate_size": 14} for case in QWEN_MOE], {**MOE, "qkv_bias": False}],
    "qwen3_moe": [*QWEN_MOE, {**MOE, "head_dim": 20, "attention_bias": True}],
    "olmoe": [{"num_experts": 3}, {"num_experts": 2, "attention_bias": True, "tie_word_embeddings": True}],
    "deepseek_v2": [*DEEPSEEK, {**LATENT, "mlp_bias": True}],
    "deepseek_v3": DEEPSEEK,
    "qwen3_next": NEXT,
    "qwen3_5_text": PLAIN_HYBRID,
    "qwen3_5_moe_text": [{**HYBRID, **SHARED}],
    "starcoder2": [{}, {"use_bias": False}, {"num_key_value_heads": 1, "tie_word_embeddings": False}],
    "gpt_oss": [{"num_local_experts": 3, "head_dim": 20}, {"num_local_experts": 2, "attention_bias": False}],
    "glm4_moe": [EXPERTS, {**EXPERTS, "head_dim": 20, "attention_bias": True, "use_qk_norm": True}],
    "glm4_moe_lite": [*DEEPSEEK, {**LATENT, "mlp_layer_types": ["sparse", "dense"]}],
}

QWEN3_TOWERS = [
    {"depth": 2, "hidden_size": 32, "out_hidden_size": 48, "num_heads": 2, "intermediate_size": 50,
     "deepstack_visual_indexes": [0, 1]},
    {"depth": 1, "hidden_size": 16, "out_hidden_size": 48, "num_heads": 2, "intermediate_size": 20,
     "patch_size": 7, "num_position_embeddings": 9, "deepstack_visual_indexes": [0]},
]  # fmt: skip

VISION = {
    "qwen2_vl": [
        {"depth": 2, "embed_dim": 32, "hidden_size": 48, "num_heads": 2, "mlp_ratio": 3},
        {"depth": 1, "embed_dim": 16, "hidden_size": 48, "num_heads": 2, "patch_size": 7, "spatial_merge_size": 3},
    ],
    "qwen2_5_vl": [
        {"depth": 2, "hidden_size": 32, "out_hidden_size": 48, "num_heads": 2, "intermediate_size": 50},
        {"depth": 1, "hidden_size": 16, "out_hidden_size": 48, "num_heads": 2, "temporal_patch_size": 1},
    ],
    "gemma3": [
        {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 50},
        {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 28, "patch_size": 7,
         "vision_use_head": False},
    ],
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"), QWEN3_TOWERS),
}  # fmt: skip

TEXTS: dict[str, dict[str, Any]] = {
    "qwen3_5": HYBRID,
    "qwen3_5_moe": {**HYBRID, **SHARED},
    "qwen3_vl_moe": {**MOE, "head_dim": 20},
}
"""Settings of the text model beside a vision tower."""

CASES = [
    pytest.param(model_type, ending, config, id=f"{model_type}-{ending}-{number}")
    for model_type, configs in DECODERS.items()
    for ending in FAMILIES[model_type].heads
    for number, config in enumerate(configs)
] + [
    pytest.param(model_type, "ForConditionalGeneration", {"text": text, "vision": vision}, id=f"{model_type}-{n}{m}")
    for model_type, visions in VISION.items()
    for n, vision in enumerate(visions)
    for m, text in enumerate([{}, {"tie_word_embeddings": True}])
    for text in [{**text, **TEXTS.get(model_type, {})}]
]


def build(model_type: str, ending: str, settings: dict[str, Any]) -> Any:
    """A model on the meta device: names and shapes, no weights."""
    family = FAMILIES[model_type]
    config_class = transformers.CONFIG_MAPPING[model_type]
    if "vision" in settings:
        tied = settings["text"].get("tie_word_embeddings", False)
        config = config_class(
            text_config={**TEXT, "tie_word_embeddings": tied, **settings["text"]},
            vision_config=settings["vision"],
            tie_word_embeddings=tied,
        )
    else:
        config = config_class(**{**TEXT, **settings})
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        model = getattr(transformers, family.prefix + ending)(config)
    model.config.architectures = [type(model).__name__]
    return model


def stored_config(model: Any) -> dict[str, Any]:
    """config.json as save_pretrained writes it."""
    config: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=True))
    return config


TAKEN_OUT = ("qwen3_5_text", "qwen3_5_moe_text")
"""Text models that can be loaded out of a vision model's file, whose prefix they then keep; their own has none."""


def saved_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the file that save_pretrained writes: tied copies left out, conversions undone."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    # As from_pretrained remembers them: with the prefixes that files of the hub have.
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    if model.config.model_type in TAKEN_OUT:
        conversions = [one for one in conversions if type(one).__name__ != "PrefixChange"]
    model._weight_conversions = conversions
    state = revert_weight_conversion(model, stored_once(model))
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if model.config.model_type == "qwen3_vl_moe":  # transformers 5 transposes on loading and keeps what it loaded
        packs = [name for name in shapes if ".mlp.experts." in name]
        shapes |= {name: (shapes[name][0], *shapes[name][:0:-1]) for name in packs}
    return shapes


def stored_once(model: Any) -> dict[str, Any]:
    """The state dict without the second names of tied parameters."""
    once = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return {name: tensor for name, tensor in model.state_dict().items() if name in once}


def outlines(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {name: Tensor(name, F32, shape, ()) for name, shape in shapes.items()}


@pytest.mark.parametrize(("model_type", "ending", "settings"), CASES)
def test_a_family_has_the_names_shapes_and_order_of_transformers(
    model_type: str, ending: str, settings: dict[str, Any]
) -> None:
    model = build(model_type, ending, settings)
    config = stored_config(model)
    running = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    expected = expected_shapes(config)
    assert expected is not None
    assert list(expected.items()) == list(running.items())

    state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    named = name_model(outlines(state), config, MergeOptions())
    assert not named.problems
    assert named.family == type(model).__name__
    assert {name: value.shape for name, value in named.tensors.items()} == saved_shapes(model)
    assert not named.config_changes


@pytest.mark.parametrize("model_type", sorted(set(DECODERS) - {"llama", "mistral", "qwen2", "qwen3"}))
def test_files_of_the_hub_pass_as_they_are(model_type: str) -> None:
    model = build(model_type, "ForCausalLM", DECODERS[model_type][0])
    saved = saved_shapes(model)
    named = name_model(outlines(saved), stored_config(model), MergeOptions())
    assert not named.problems
    assert list(named.tensors) == list(saved)


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_flat_configs_of_old_vision_models_say_the_same_as_nested_ones(model_type: str) -> None:
    model = build(model_type, "ForConditionalGeneration", {"text": {}, "vision": VISION[model_type][0]})
    nested = stored_config(model)
    flat = {key: value for key, value in nested.items() if key != "text_config"}
    flat |= {key: value for key, value in nested["text_config"].items() if key != "model_type"}
    assert expected_shapes(flat) == expected_shapes(nested)


def test_labels_that_are_put_right_load() -> None:
    model = build("qwen2", "ForTokenClassification", {"num_labels": 5})
    state = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    wrong = {**stored_config(model), "id2label": {"0": "a"}, "label2id": {"a": 0}}
    changes = name_model(outlines(state), wrong, MergeOptions()).config_changes
    right = {key: value for key, value in {**wrong, **changes}.items() if value is not None}
    assert transformers.Qwen2Config.from_dict(right).num_labels == 5


TINY = {
    "num_hidden_layers": 2, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "depth": 2,
    "first_k_dense_replace": 1, "vocab_size": 64, "pad_token_id": 0, "moe_num_experts": 4, "expert_num": 4,
}  # fmt: skip


def shrink(config: Any) -> None:
    """Fewer layers and experts, in place; the rest as transformers' defaults have it."""
    for key, value in TINY.items():
        if hasattr(config, key):
            setattr(config, key, value)
    for key in ("layer_types", "mlp_layer_types", "layers_block_type"):
        if getattr(config, key, None):
            with contextlib.suppress(AttributeError):
                setattr(config, key, getattr(config, key)[:2])
    for key in ("text_config", "vision_config"):
        if getattr(config, key, None) is not None:
            shrink(getattr(config, key))


PREFIXES_ONLY = {
    "aya_vision", "got_ocr2", "internvl", "llava", "llava_next", "llava_next_video", "llava_onevision",
    "mistral3", "paligemma", "vipllava",
}  # fmt: skip

EXTRA: dict[str, dict[str, Any]] = {
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "deepseek_v32": {"mlp_layer_types": ["dense", "sparse"], "num_hidden_layers": 2},
    "glm_moe_dsa": {"mlp_layer_types": ["dense", "sparse"], "num_hidden_layers": 2},
    "aya_vision": {"vision_config": {"model_type": "siglip_vision_model"}},
}
"""Settings without which the default configuration builds no model, or none with experts among its first layers."""

NO_ORACLE = {
    "qwen3_omni_moe": "the whole model needs audio parts that the default configuration lacks",
    "qwen3_omni_moe_thinker": "no automatic class builds it",
}


@pytest.mark.parametrize("model_type", sorted(set(RENAMES) - set(NO_ORACLE)))
def test_renames_are_those_of_save_pretrained(model_type: str) -> None:
    config = transformers.CONFIG_MAPPING[model_type](**EXTRA.get(model_type, {}))
    shrink(config)
    model = None
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
            if type(config) in auto._model_mapping:
                model = auto.from_config(config)
    assert model is not None
    state = {name: tuple(tensor.shape) for name, tensor in stored_once(model).items()}
    named = name_model(outlines(state), stored_config(model), MergeOptions())
    assert not named.problems
    assert named.family is None
    assert {name: value.shape for name, value in named.tensors.items()} == saved_shapes(model)
    if model_type not in PREFIXES_ONLY:
        assert any(".experts.gate_up_proj" in name for name in state)


def test_model_types_that_tie_by_default_do_so_in_transformers() -> None:
    for model_type in sorted(TIED_BY_DEFAULT):
        if model_type in transformers.CONFIG_MAPPING:
            assert transformers.CONFIG_MAPPING[model_type]().tie_word_embeddings is True, model_type
