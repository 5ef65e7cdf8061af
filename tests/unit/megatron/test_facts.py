"""What training recorded, under one set of names."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from unshard.checkpoint import Note
from unshard.dtypes import BF16
from unshard.errors import UnshardError
from unshard.formats.megatron.facts import facts_beside, read_facts
from unshard.formats.torch_file import Global, Opaque


def namespace(**members: Any) -> Opaque:
    return Opaque(Global("argparse", "Namespace"), state=members)


def beside(directory: Path) -> dict[str, Any]:
    problems: list[UnshardError] = []
    facts = facts_beside(directory, problems)
    assert not problems
    return facts


class TestNamespace:
    def test_plain_values_stay_and_objects_go(self) -> None:
        facts = read_facts(
            namespace(
                num_layers=4,
                norm_epsilon=1e-6,
                params_dtype=BF16,
                moe_layer_freq=[0, 1],
                spec=None,
                init=Global("torch.nn.init", "normal_"),
                backend=Opaque(Global("megatron.core.transformer.enums", "AttnBackend"), (5,)),
                layout=Opaque(Global("megatron.core.enums", "Fp8Recipe"), ("tensorwise",)),
                timers=Opaque(Global("megatron.core.timers", "Timers"), state={"a": 1}),
                scale=float("nan"),
                stages=[Opaque(Global("x", "LayerType"), (4,))],
                _hidden=1,
            )
        )
        assert facts == {
            "num_layers": 4,
            "norm_epsilon": 1e-6,
            "params_dtype": "bfloat16",
            "moe_layer_freq": [0, 1],
            "spec": None,
            "init": "torch.nn.init.normal_",
            "layout": "tensorwise",
        }

    def test_groups_mean_nothing_without_grouped_attention(self) -> None:
        assert read_facts(namespace(num_attention_heads=8, num_query_groups=1, group_query_attention=False)) == {
            "num_attention_heads": 8,
            "num_query_groups": 8,
            "group_query_attention": False,
        }
        assert read_facts({"num_attention_heads": 8, "num_query_groups": None})["num_query_groups"] == 8
        assert read_facts(namespace(num_attention_heads=8, num_query_groups=2, group_query_attention=True)) == {
            "num_attention_heads": 8,
            "num_query_groups": 2,
            "group_query_attention": True,
        }

    @pytest.mark.parametrize(
        "recorded", [None, 3, "args", [1], Opaque(Global("a", "B")), Opaque(Global("a", "B"), (1,))]
    )
    def test_what_holds_no_settings_has_no_facts(self, recorded: object) -> None:
        assert read_facts(recorded) == {}

    def test_what_contains_itself_or_shares_without_end_is_bounded(self) -> None:
        circle: list[Any] = []
        circle.append(circle)
        shared: list[Any] = [1] * 10
        for _ in range(7):
            shared = [shared] * 10
        assert read_facts(namespace(num_layers=2, circle=circle, shared=shared)) == {"num_layers": 2}


class TestTransformerConfig:
    def test_its_names_become_arguments(self) -> None:
        facts = read_facts(
            {
                "num_moe_experts": 4,
                "layernorm_zero_centered_gamma": True,
                "layernorm_epsilon": 1e-5,
                "num_layers_in_first_pipeline_stage": 1,
                "gated_linear_unit": True,
                "activation_func": "<function silu at 0x7f>",
                "params_dtype": "torch.bfloat16",
                "share_embeddings_and_output_weights": False,
                "num_query_groups": 2,
                "num_attention_heads": 4,
            }
        )
        assert facts["num_experts"] == 4
        assert facts["apply_layernorm_1p"] is True
        assert facts["norm_epsilon"] == 1e-5
        assert facts["decoder_first_pipeline_num_layers"] == 1
        assert facts["swiglu"] is True
        assert facts["params_dtype"] == "bfloat16"
        assert facts["untie_embeddings_and_output_weights"] is True
        assert facts["group_query_attention"] is True
        assert not {"num_moe_experts", "layernorm_epsilon", "share_embeddings_and_output_weights"} & facts.keys()

    @pytest.mark.torch
    def test_the_real_one(self) -> None:
        """Of all its fields those that say something of the architecture arrive; the names are megatron-core's own."""
        pytest.importorskip("torch")
        config = pytest.importorskip("megatron.core.transformer.transformer_config")
        import dataclasses

        real = config.TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, num_moe_experts=2)
        facts = read_facts({field.name: getattr(real, field.name) for field in dataclasses.fields(real)})
        assert (facts["num_layers"], facts["num_experts"], facts["num_query_groups"]) == (2, 2, 2)
        assert facts["norm_epsilon"] == real.layernorm_epsilon
        json.dumps(facts, allow_nan=False)


class TestFiles:
    @pytest.mark.parametrize("place", ["model/dist_ckpt", "dist_ckpt", "."])
    def test_verl(self, place: str, tmp_path: Path) -> None:
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / "transformer_config.json").write_text(
            '{"num_moe_experts": 2, "attention_backend": "AttnBackend.x"}'
        )
        assert beside(tmp_path / place) == {"num_experts": 2, "attention_backend": "AttnBackend.x"}

    @pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1} x', "[" * 100_000])
    def test_a_malformed_one_is_no_absent_one(self, text: str, tmp_path: Path) -> None:
        """A damaged transformer_config.json must not be taken for a missing one."""
        (tmp_path / "transformer_config.json").write_text(text)
        problems: list[UnshardError] = []
        assert facts_beside(tmp_path, problems) == {}
        assert "transformer_config.json" in problems[0].message
        assert problems[0].hint

    def test_bridge(self, tmp_path: Path) -> None:
        pytest.importorskip("yaml")
        (tmp_path / "run_config.yaml").write_text(
            """
model:
  _target_: megatron.bridge.models.llama.LlamaModelProvider
  num_layers: 2
  activation_func: {_call_: false, _target_: torch.nn.functional.silu}
  gated_linear_unit: true
  attention_backend: {_args_: [5], _call_: true, _name_: auto, _target_: megatron.core.transformer.enums.AttnBackend}
  params_dtype: {_call_: false, _target_: torch.bfloat16}
  generation_config: {_call_: true, _target_: transformers.GenerationConfig.from_dict, config_dict: {a: 1}}
  rotary_base: 500000
peft: {_target_: megatron.bridge.peft.lora.LoRA, alpha: 32, dim: 16}
"""
        )
        assert beside(tmp_path) == {
            "num_layers": 2,
            "activation_func": "torch.nn.functional.silu",
            "gated_linear_unit": True,
            "swiglu": True,
            "quick_geglu": False,
            "attention_backend": "auto",
            "params_dtype": "bfloat16",
            "rotary_base": 500000,
            "lora_dim": 16,
            "lora_alpha": 32,
        }

    def test_bridge_with_a_builder(self, tmp_path: Path) -> None:
        pytest.importorskip("yaml")
        text = "model: {vocab_size: 7, transformer: {num_moe_experts: 3, _target_: megatron.core.TransformerConfig}}"
        (tmp_path / "run_config.yaml").write_text(text)
        assert beside(tmp_path) == {"vocab_size": 7, "num_experts": 3}

    def test_without_pyyaml_it_is_said(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "yaml", None)
        (tmp_path / "run_config.yaml").write_text("model: {num_layers: 2}")
        problems: list[UnshardError] = []
        notes: list[Note] = []
        assert facts_beside(tmp_path, problems, notes) == {}
        assert not problems
        assert "run_config.yaml was not read" in notes[0].text
        assert "pip install 'unshard[yaml]'" in notes[0].text

    @pytest.mark.parametrize(
        "text",
        [
            "model: [",
            "- 1",
            "model: !!python/object/apply:os.system ['true']",
            "a: &a {b: 1}\nc: {<<: *a}",
            "? [1]\n: 2",
        ],
    )
    def test_yaml_that_is_no_plain_mapping(self, text: str, tmp_path: Path) -> None:
        pytest.importorskip("yaml")
        (tmp_path / "run_config.yaml").write_text(text)
        problems: list[UnshardError] = []
        assert facts_beside(tmp_path, problems) == {}
        assert "run_config.yaml" in problems[0].message

    def test_yaml_that_shares_without_end(self, tmp_path: Path) -> None:
        pytest.importorskip("yaml")
        lines = ["a0: &a0 [1, 1]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 40)]
        (tmp_path / "run_config.yaml").write_text(
            "model: {num_layers: 2, deep: *a39}\n".join(["\n".join(lines) + "\n", ""])
        )
        assert beside(tmp_path) == {"num_layers": 2}


class TestNemo:
    def test_the_graph(self, tmp_path: Path) -> None:
        (tmp_path / "weights").mkdir()
        (tmp_path / "context").mkdir()
        (tmp_path / "context/io.json").write_text(json.dumps(GRAPH))
        assert beside(tmp_path / "weights") == {
            "num_layers": 2,
            "activation_func": "torch.nn.functional.silu",
            "gated_linear_unit": True,
            "swiglu": True,
            "quick_geglu": False,
            "params_dtype": "bfloat16",
            "attention_backend": "flash",
            "moe_layer_freq": [0, 1],
            "lora_dim": 8,
        }

    def test_the_fuller_yaml_goes_first(self, tmp_path: Path) -> None:
        pytest.importorskip("yaml")
        (tmp_path / "weights").mkdir()
        (tmp_path / "context").mkdir()
        (tmp_path / "context/io.json").write_text(json.dumps(GRAPH))
        (tmp_path / "context/model.yaml").write_text("config: {num_layers: 2, rotary_base: 7}\nmodel_transform: null\n")
        facts = beside(tmp_path / "weights")
        assert (facts["rotary_base"], facts["params_dtype"]) == (7, "bfloat16")

    @pytest.mark.parametrize(
        "graph",
        [
            {},
            {"root": 1, "objects": []},
            {"root": {"type": "ref", "key": "gone"}, "objects": {}},
            {
                "root": {"type": "ref", "key": "a"},
                "objects": {"a": {"type": "ref", "key": "a", "items": [1, [], ["x"]]}},
            },
        ],
    )
    def test_graphs_of_other_shapes(self, graph: dict[str, Any], tmp_path: Path) -> None:
        (tmp_path / "context").mkdir()
        (tmp_path / "context/io.json").write_text(json.dumps(graph))
        assert beside(tmp_path) == {}


def leaf(value: object) -> dict[str, Any]:
    return {"type": "leaf", "value": value, "paths": ["<root>"]}


def pyref(module: str, name: str) -> dict[str, Any]:
    return {"type": "pyref", "module": module, "name": name}


def configured(**members: object) -> dict[str, Any]:
    items = [[f"Attr(name='{name}')", value] for name, value in members.items()]
    return {"type": pyref("nemo_run.config", "Config"), "items": items, "metadata": {}, "paths": ["<root>"]}


GRAPH = {
    "root": {"type": "ref", "key": "trainer_context_1"},
    "objects": {
        "trainer_context_1": configured(model={"type": "ref", "key": "llama_model_1"}),
        "llama_model_1": configured(
            config={"type": "ref", "key": "llama3_config8_b_1"}, model_transform=configured(dim=leaf(8))
        ),
        "llama3_config8_b_1": configured(
            num_layers=leaf(2),
            activation_func=pyref("torch.nn.functional", "silu"),
            gated_linear_unit=leaf(True),
            params_dtype=pyref("torch", "bfloat16"),
            attention_backend=pyref("megatron.core.transformer.enums", "AttnBackend.flash"),
            moe_layer_freq={
                "type": pyref("builtins", "list"),
                "items": [["Index(index=0)", leaf(0)], ["Index(index=1)", leaf(1)]],
                "metadata": {},
            },
            generation_config=configured(),
        ),
    },
}
