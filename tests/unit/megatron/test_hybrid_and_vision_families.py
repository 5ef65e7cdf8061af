"""Delta nets, sinks and vision towers: random models, as Megatron writes them, come back bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from megatron.checking import assert_same, merge_and_compare, random_model, read_model  # noqa: E402
from megatron.from_hf import gpt_oss, llama, moe, qwen3_next, qwen_vl  # noqa: E402
from megatron.writer import write_legacy  # noqa: E402
from unshard.cli import main  # noqa: E402

pytestmark = pytest.mark.torch

SMALL = {
    "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64,
    "vocab_size": 40, "pad_token_id": 0,
}  # fmt: skip
HYBRID = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 16}
VISION = {
    "depth": 2, "hidden_size": 32, "out_hidden_size": 48, "num_heads": 4, "intermediate_size": 40, "patch_size": 4,
    "embed_dim": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
}  # fmt: skip
CENTRED = {"apply_layernorm_1p": True}

LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2},
    {"tp": 2, "pp": 2, "te": False},
    {"write": "torch_dist", "tp": 2},
]
MOE_LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2, "ep": 2, "etp": 1},
    {"tp": 2, "pp": 2, "te": False},
    {"write": "torch_dist", "tp": 2, "homogeneous": False},
]


@pytest.mark.parametrize("layout", MOE_LAYOUTS, ids=str)
def test_qwen3_next(layout: dict[str, Any], tmp_path: Path) -> None:
    config = transformers.Qwen3NextConfig(**SMALL, **HYBRID, **SHARED)
    merge_and_compare(random_model(config), qwen3_next.to_megatron, tmp_path, args=CENTRED, **layout)


def test_qwen3_next_whose_run_had_plain_norms(tmp_path: Path) -> None:
    """Norms are then stored as 1 more than in the file, except the delta net's own; float32 keeps what is small."""
    config = transformers.Qwen3NextConfig(**SMALL, **HYBRID, **SHARED)
    model = random_model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.round(parameter * 64) / 64)  # so that adding 1 loses no bit

    def to_megatron(state: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
        full = qwen3_next.to_megatron(state, config)
        return {name: value + 1 if "norm" in name else value for name, value in full.items()}

    merge_and_compare(model, to_megatron, tmp_path, args={"apply_layernorm_1p": False}, tp=2)


@pytest.mark.parametrize("inner", ["transformer_layer", "mtp_model_layer"])
def test_qwen3_next_with_a_layer_that_predicts_further_tokens(inner: str, tmp_path: Path) -> None:
    """Which transformers does not have: the layer is a copy of a full attention layer, with other values."""
    config = transformers.Qwen3NextConfig(**SMALL, **HYBRID, **SHARED)
    random_model(config).save_pretrained(tmp_path / "truth")
    state = read_model(tmp_path / "truth")
    inside = {
        f"mtp.layers.0.{name.removeprefix('model.layers.3.')}": value + 1
        for name, value in state.items()
        if name.startswith("model.layers.3.")
    }
    around = {
        "eh_proj": ("mtp.fc.weight", torch.randn(48, 96)),
        "enorm": ("mtp.pre_fc_norm_embedding.weight", torch.randn(48)),
        "hnorm": ("mtp.pre_fc_norm_hidden.weight", torch.randn(48)),
        "final_layernorm": ("mtp.norm.weight", torch.randn(48)),
    }
    as_third = {name.replace("mtp.layers.0.", "model.layers.3."): value for name, value in inside.items()}
    full = qwen3_next.to_megatron(dict(state), config)
    for name, value in qwen3_next.to_megatron(dict(state) | as_third, config).items():
        if name.startswith("decoder.layers.3."):
            full[f"mtp.layers.0.{inner}.{name.removeprefix('decoder.layers.3.')}"] = value
    full |= {f"mtp.layers.0.{name}.weight": value for name, (_, value) in around.items()}
    write_legacy(tmp_path / "checkpoint", full, tp=2, args=CENTRED)
    typed = ["merge", str(tmp_path / "checkpoint"), str(tmp_path / "out"), "--config", str(tmp_path / "truth")]
    assert main(typed) == 0
    assert_same(read_model(tmp_path / "out"), state | inside | dict(around.values()))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_qwen3_5_text(layout: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    config = transformers.Qwen3_5TextConfig(**SMALL, **HYBRID, tie_word_embeddings=tied)
    config.architectures = ["Qwen3_5ForCausalLM"]
    layout = {key: value for key, value in layout.items() if key != "homogeneous"}
    if layout.get("write") == "torch_dist":
        layout["homogeneous"] = False
    merge_and_compare(random_model(config), qwen3_next.to_megatron, tmp_path, args=CENTRED, **layout)


def test_qwen3_5_with_experts(tmp_path: Path) -> None:
    config = transformers.Qwen3_5MoeTextConfig(**SMALL, **HYBRID, **SHARED)
    config.architectures = ["Qwen3_5MoeForCausalLM"]
    merge_and_compare(random_model(config), qwen3_next.to_megatron, tmp_path, args=CENTRED, tp=2, ep=2)


@pytest.mark.parametrize("layout", MOE_LAYOUTS, ids=str)
def test_gpt_oss(layout: dict[str, Any], tmp_path: Path) -> None:
    config = transformers.GptOssConfig(
        **SMALL, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
    )
    merge_and_compare(random_model(config), gpt_oss.to_megatron, tmp_path, **layout)


TOWERS = {
    "qwen2_vl": ("Qwen2VL", llama.to_megatron, {}),
    "qwen2_5_vl": ("Qwen2_5_VL", llama.to_megatron, {}),
    "qwen3_vl": ("Qwen3VL", llama.to_megatron, {}),
    "qwen3_5": ("Qwen3_5", qwen3_next.to_megatron, HYBRID),
    "qwen3_5_moe": ("Qwen3_5Moe", qwen3_next.to_megatron, {**HYBRID, **SHARED}),
}


@pytest.mark.parametrize("tower", ["kept", "rebuilt"])
@pytest.mark.parametrize("model_type", TOWERS)
def test_vision_towers(model_type: str, tower: str, tmp_path: Path) -> None:
    prefix, text_to_megatron, more = TOWERS[model_type]
    text = {"num_hidden_layers": 2, **SMALL, **more}
    if model_type.startswith("qwen2"):
        del text["head_dim"]
    config = transformers.CONFIG_MAPPING[model_type](text_config=text, vision_config=VISION)
    config.architectures = [f"{prefix}ForConditionalGeneration"]
    args = CENTRED if "qwen3_5" in model_type else {}

    def to_megatron(state: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
        full = qwen_vl.text_to_megatron(state, config, text_to_megatron)
        return full | (qwen_vl.keep_tower(state) if tower == "kept" else qwen_vl.rebuild_tower(state, config))

    logits = not model_type.startswith("qwen2")  # which want sections of positions
    merge_and_compare(random_model(config), to_megatron, tmp_path, args=args, tp=2, logits=logits)


@pytest.mark.parametrize("version", ["4.57.1", "5.24.0"])
def test_experts_of_qwen3_vl_moe_lie_in_the_file_as_on_the_hub(version: str, tmp_path: Path) -> None:
    """Packed and transposed; what transformers 5 saves of a model that it did not load is not, and loads as well.

    `version` of transformers: the one in config.json, 4 on the hub.
    """
    config = transformers.Qwen3VLMoeConfig(
        text_config={"num_hidden_layers": 2, "tie_word_embeddings": False, **SMALL, **EXPERTS}, vision_config=VISION
    )
    config.architectures = ["Qwen3VLMoeForConditionalGeneration"]
    model = random_model(config)
    truth = {name: value.detach() for name, value in model.state_dict().items()}
    full = qwen_vl.text_to_megatron(_unpacked(truth), config, moe.to_megatron) | qwen_vl.keep_tower(truth)
    write_legacy(tmp_path / "checkpoint", full, tp=2, ep=2, etp=1)
    config.save_pretrained(tmp_path / "config")
    file = tmp_path / "config" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "transformers_version": version}))
    typed = ["merge", str(tmp_path / "checkpoint"), str(tmp_path / "out"), "--config", str(tmp_path / "config")]
    assert main(typed) == 0
    packed = {name for name in truth if ".mlp.experts." in name}
    assert len(packed) == 4
    expected = {name: value.transpose(1, 2) if name in packed else value for name, value in truth.items()}
    assert_same(read_model(tmp_path / "out"), expected)
    loaded = type(model).from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    assert_same({name: value.detach() for name, value in loaded.items()}, truth)


def _unpacked(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Expert by expert, as `from_hf.moe` expects them."""
    apart: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        stem, _, part = name.rpartition(".")
        if not stem.endswith(".mlp.experts"):
            apart[name] = value
            continue
        for expert, matrix in enumerate(value):
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
            for kind, piece in zip(names, matrix.chunk(len(names)), strict=True):
                apart[f"{stem}.{expert}.{kind}.weight"] = piece
    return apart
