"""Adapters of Megatron-Bridge, merged: what PEFT makes of the output is what training computed.

The truth is the base with its adapters added on Megatron's side, before anything is taken apart.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from unshard.cli import main

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from safetensors.torch import load_file  # noqa: E402

from megatron.adapters import add_adapters, canonical, dora, lora  # noqa: E402
from megatron.checking import TOKENS, assert_same, random_model, read_model  # noqa: E402
from megatron.from_hf import deepseek, llama, moe, qwen3_next, qwen_vl  # noqa: E402
from megatron.writer import write_legacy, write_torch_dist  # noqa: E402

pytestmark = pytest.mark.torch

State = dict[str, torch.Tensor]
ALPHA = 6
GROUPS, HEAD = 2, 4
SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": GROUPS, "head_dim": HEAD,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
LATENT: dict[str, Any] = {
    "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
    "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_shared_experts": 1,
    "n_group": 2, "topk_group": 1,
}  # fmt: skip


@dataclass
class Case:
    """A random base model in both worlds."""

    model: Any
    state: State
    full: State
    to_megatron: Callable[[State, Any], State]
    place: Path
    fill_from: Path | None = None

    def write(self, adapters: Mapping[str, torch.Tensor], how: str, *, alone: bool = False, **layout: Any) -> Path:
        """A checkpoint of base and adapters, or of the adapters alone."""
        full = dict(adapters) if alone else self.full | dict(adapters)
        writer = {"legacy": write_legacy, "torch_dist": write_torch_dist}[how]
        writer(self.place / "run", full, **layout)
        return self.place / "run"

    def merge(self, *options: str, alpha: bool = True) -> Path:
        output = self.place / f"out{''.join(options)}"
        given = ["--lora-alpha", str(ALPHA)] if alpha else []
        given += ["--fill-from", str(self.fill_from)] if self.fill_from else []
        arguments = ["merge", str(self.place / "run"), str(output), "--config", str(self.place / "truth")]
        assert main([*arguments, *given, *options]) == 0
        return output

    def check(self, adapters: State, *, logits: bool = True) -> None:
        """Base and adapter as they come out, loaded by PEFT, and the fused model: all compute what training did."""
        merged = add_adapters(self.full, adapters, ALPHA, groups=GROUPS)
        output = self.merge()
        assert_same(read_model(output), self.state)
        fused = self.merge("--fuse-lora")
        self.assert_holds(read_model(fused), merged)
        loaded = self.load_peft(output, output / "lora_adapter")
        if logits:
            by_peft = compute(loaded)
            torch.testing.assert_close(by_peft, compute(self.load(fused)), rtol=1e-4, atol=1e-4)
            assert not torch.allclose(by_peft, compute(self.load(output)), atol=1e-2), "the adapter has no effect"
        self.check_peft(loaded, merged)

    def check_peft(self, loaded: Any, merged: State) -> None:
        """The model that PEFT loaded has these weights once it merges them."""
        loaded.merge_and_unload().save_pretrained(self.place / "by_peft")
        self.assert_holds(read_model(self.place / "by_peft"), merged)

    def load(self, directory: Path) -> Any:
        model = type(self.model).from_pretrained(directory, dtype="auto").eval()
        model.set_experts_implementation("eager")
        return model

    def load_peft(self, base: Path, adapter: Path) -> Any:
        """The model under PEFT; every tensor of the adapter must find its place."""
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            return peft.PeftModel.from_pretrained(self.load(base), adapter).eval()

    def assert_holds(self, found: State, merged: State) -> None:
        again = self.to_megatron(found, self.model.config)
        assert again.keys() == merged.keys()
        for name, tensor in merged.items():
            torch.testing.assert_close(again[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda text: f"{name}: {text}")  # noqa: B023


@torch.no_grad()
def compute(model: Any) -> torch.Tensor:
    result: torch.Tensor = model(input_ids=torch.tensor([TOKENS])).logits
    return result


def of_vision(state: State, config: Any) -> State:
    text = qwen_vl.text_to_megatron(state, config, llama.to_megatron)
    return text | qwen_vl.rebuild_tower(state, config)


def vision_model(model_type: str, prefix: str) -> Callable[[], Any]:
    """A model with a tower, by the name of its config."""

    def build() -> Any:
        text = {**SIZES, "intermediate_size": 24, "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 0]}}
        if model_type.startswith("qwen2"):
            del text["head_dim"]
        vision = {"depth": 2, "hidden_size": 16, "embed_dim": 16, "intermediate_size": 24, "num_heads": 2}
        outer = {"out_hidden_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
        config = transformers.CONFIG_MAPPING[model_type](text_config=text, vision_config=vision | outer)
        config.architectures = [f"{prefix}ForConditionalGeneration"]
        return config

    return build


MODELS: dict[str, tuple[Callable[[], Any], Callable[[State, Any], State]]] = {
    "qwen3": (lambda: transformers.Qwen3Config(**SIZES, intermediate_size=24), llama.to_megatron),
    "qwen3_moe": (
        lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, intermediate_size=24, num_experts=4),
        moe.to_megatron,
    ),
    "mixtral": (
        lambda: transformers.MixtralConfig(
            **SIZES, intermediate_size=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
        ),
        moe.to_megatron,
    ),
    "deepseek_v3": (
        lambda: transformers.DeepseekV3Config(**{**SIZES, **EXPERTS, **LATENT}, intermediate_size=24),
        deepseek.to_megatron,
    ),
    "qwen3_next": (
        lambda: transformers.Qwen3NextConfig(
            **SIZES, **EXPERTS, intermediate_size=24, num_experts=4, shared_expert_intermediate_size=8,
            layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=4,
            linear_key_head_dim=4, linear_value_head_dim=4,
        ),
        qwen3_next.to_megatron,
    ),
    "qwen2_5_vl": (vision_model("qwen2_5_vl", "Qwen2_5_VL"), of_vision),
    "qwen3_vl": (vision_model("qwen3_vl", "Qwen3VL"), of_vision),
}  # fmt: skip


@pytest.fixture
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    config, to_megatron = MODELS[getattr(request, "param", "qwen3")]
    model = random_model(config())
    model.save_pretrained(tmp_path / "truth")
    state = read_model(tmp_path / "truth")
    return Case(model, state, to_megatron(dict(state), model.config), to_megatron, tmp_path)


def of(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [name], indirect=True)


LAYOUTS = pytest.mark.parametrize(
    ("how", "layout"),
    [
        ("legacy", {"tp": 2, "pp": 2}),
        ("legacy", {"tp": 2, "te": False, "args": None}),
        ("torch_dist", {"tp": 2, "pp": 2}),
        ("torch_dist", {"tp": 4, "homogeneous": False}),
    ],
)


class TestDense:
    @LAYOUTS
    def test_lora(self, case: Case, how: str, layout: dict[str, Any]) -> None:
        adapters = lora(case.full)
        case.write(adapters, how, **layout)
        case.check(adapters)

    @LAYOUTS
    @pytest.mark.parametrize("parts", [("q", "k", "v", "gate", "up"), ("q", "v", "up")])
    def test_canonical_lora(self, case: Case, parts: tuple[str, ...], how: str, layout: dict[str, Any]) -> None:
        adapters = canonical(case.full, parts, groups=GROUPS, head=HEAD)
        case.write(adapters, how, **layout)
        case.check(adapters)

    @LAYOUTS
    def test_dora_of_matrices_cut_by_rows(self, case: Case, how: str, layout: dict[str, Any]) -> None:
        adapters = dora(case.full, ("linear_qkv", "linear_fc1"))
        case.write(adapters, how, **layout)
        case.check(adapters)

    @pytest.mark.parametrize("how", ["legacy", "torch_dist"])
    def test_dora_of_all(self, case: Case, how: str) -> None:
        adapters = dora(case.full, ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"))
        case.write(adapters, how)
        case.check(adapters)

    def test_dora_of_parts_of_rows_is_refused(self, case: Case, capsys: pytest.CaptureFixture[str]) -> None:
        case.write(dora(case.full, ("linear_proj",)), "legacy", tp=2)
        with pytest.raises(AssertionError):
            case.merge()
        assert "no DoRA of the whole matrix" in capsys.readouterr().err

    def test_virtual_stages(self, case: Case) -> None:
        adapters = lora(case.full)
        case.write(adapters, "legacy", tp=2, pp=1, vpp=2, args={})
        case.check(adapters)


class TestOtherModels:
    @of("qwen3_moe")
    @pytest.mark.parametrize(
        ("how", "layout"),
        [
            ("legacy", {"tp": 2, "ep": 2, "etp": 1}),
            ("legacy", {"tp": 2, "experts": "sequential"}),
            ("torch_dist", {"tp": 2, "etp": 1}),
            ("torch_dist", {"tp": 2}),
        ],
    )
    def test_experts(self, case: Case, how: str, layout: dict[str, Any]) -> None:
        adapters = lora(case.full, ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"))
        case.write(adapters, how, **layout)
        case.check(adapters)

    @of("mixtral")
    def test_experts_of_other_names(self, case: Case) -> None:
        adapters = lora(case.full)
        case.write(adapters, "legacy", tp=2, ep=2)
        case.check(adapters)

    @pytest.mark.parametrize("case", ["qwen2_5_vl", "qwen3_vl"], indirect=True)
    def test_models_that_run_under_other_names_than_their_files_have(self, case: Case) -> None:
        """PEFT loads by the names of the running model; towers and decoders have modules of the same names."""
        adapters = lora(case.full)
        case.write(adapters, "legacy", tp=2)
        case.check(adapters, logits=False)

    @pytest.mark.parametrize("case", ["qwen3_moe", "mixtral"], indirect=True)
    def test_routers(self, case: Case) -> None:
        adapters = lora(case.full, ("linear_qkv", "router"))
        case.write(adapters, "legacy", tp=2)
        case.check(adapters)

    @of("deepseek_v3")
    @pytest.mark.parametrize("how", ["legacy", "torch_dist"])
    def test_latent_attention(self, case: Case, how: str) -> None:
        linears = ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj")
        adapters = lora(case.full, linears)
        case.write(adapters, how, tp=2, **({"homogeneous": False} if how == "torch_dist" else {}))
        case.check(adapters)

    @of("deepseek_v3")
    def test_experts_beside_dense_layers(self, case: Case, capsys: pytest.CaptureFixture[str]) -> None:
        """PEFT does not load all of these, which is said; the fused model has them all."""
        adapters = lora(case.full)
        case.write(adapters, "legacy", tp=2, ep=2)
        case.assert_holds(read_model(case.merge("--fuse-lora")), add_adapters(case.full, adapters, ALPHA))
        assert "does not load the adapters of dense layers and shared experts" in capsys.readouterr().out

    @of("qwen3_next")
    @pytest.mark.parametrize("how", ["legacy", "torch_dist"])
    def test_delta_net(self, case: Case, how: str) -> None:
        adapters = lora(case.full, ("in_proj", "out_proj", "linear_qkv", "linear_proj"))
        case.write(adapters, how, tp=2, **({"homogeneous": False} if how == "torch_dist" else {}))
        case.check(adapters)


class TestAdaptersAlone:
    @LAYOUTS
    def test_they_are_a_peft_directory(self, case: Case, how: str, layout: dict[str, Any]) -> None:
        adapters = lora(case.full)
        case.write(adapters, how, alone=True, **layout)
        output = case.merge()
        settings = json.loads((output / "adapter_config.json").read_text())
        assert (settings["r"], settings["lora_alpha"]) == (4, ALPHA)
        case.check_peft(case.load_peft(case.place / "truth", output), add_adapters(case.full, adapters, ALPHA))

    @pytest.mark.parametrize("case", ["qwen3_moe", "mixtral", "qwen3_vl"], indirect=True)
    def test_of_other_models(self, case: Case) -> None:
        """PEFT finds every module by the names that adapter_config.json gives, though no base model told them."""
        adapters = lora(case.full)
        case.write(adapters, "torch_dist", alone=True, tp=2, homogeneous=False)
        output = case.merge()
        case.check_peft(case.load_peft(case.place / "truth", output), add_adapters(case.full, adapters, ALPHA))

    @pytest.mark.parametrize("case", ["qwen3_moe", "mixtral", "qwen3_vl"], indirect=True)
    def test_a_base_model_is_put_below_them(self, case: Case) -> None:
        adapters = lora(case.full)
        case.write(adapters, "torch_dist", alone=True, tp=2, homogeneous=False)
        case.fill_from = case.place / "truth"
        output = case.merge()
        assert_same(read_model(output), case.state)
        merged = add_adapters(case.full, adapters, ALPHA)
        case.check_peft(case.load_peft(output, output / "lora_adapter"), merged)
        case.assert_holds(read_model(case.merge("--fuse-lora")), merged)

    def test_adapter_only_writes_the_same(self, case: Case) -> None:
        adapters = lora(case.full)
        case.write(adapters, "torch_dist", tp=2)
        whole, only = case.merge(), case.merge("--adapter-only")
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            assert (only / name).read_bytes() == (whole / "lora_adapter" / name).read_bytes()
        assert sorted(load_file(only / "adapter_model.safetensors")) == sorted(
            f"base_model.model.model.layers.{layer}.{module}.lora_{side}.weight"
            for layer in range(2)
            for module in (
                *[f"self_attn.{part}_proj" for part in "qkvo"], *[f"mlp.{part}_proj" for part in ("gate", "up", "down")]
            )
            for side in "AB"
        )  # fmt: skip
