"""PEFT itself as the oracle: what it saves, what it loads, what it merges."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

import peft_models as oracle  # noqa: E402

from reference import Disk  # noqa: E402
from unshard.adapters import Split, fuse_all, split  # noqa: E402
from unshard.options import MergeOptions  # noqa: E402
from unshard.tensors import Computed, Tensor  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

ATTENTION = ["q_proj", "v_proj"]


@dataclass
class Case:
    """A LoRA configuration. `told`: the shards do not tell all, so that adapter_config.json lies beside them."""

    label: str
    lora: dict[str, Any]
    model: str = "qwen2"
    tied: bool = False
    told: bool = False
    dtype: str = "float32"


CASES = [
    Case("plain", {"target_modules": ATTENTION}),
    Case("bf16", {"target_modules": ATTENTION}, dtype="bfloat16"),
    Case("all-linear", {"target_modules": "all-linear"}),
    Case("some layers", {"target_modules": ["layers.1.self_attn.q_proj", "layers.0.mlp.up_proj"]}),
    Case("ranks", {"target_modules": ATTENTION, "r": 4, "rank_pattern": {"layers.1.self_attn.q_proj": 2, "v_proj": 3}}),
    Case(
        "ranks and alphas",
        {
            "target_modules": ATTENTION,
            "r": 4,
            "rank_pattern": {"layers.1.self_attn.q_proj": 2},
            "alpha_pattern": {"^model.layers.0.self_attn.(q|v)_proj": 5, "v_proj": 32},
        },
        told=True,
    ),
    Case("rsLoRA", {"target_modules": ATTENTION, "r": 9, "use_rslora": True}, told=True),
    Case("DoRA", {"target_modules": [*ATTENTION, "down_proj"], "use_dora": True}),
    Case("DoRA bf16", {"target_modules": ATTENTION, "use_dora": True}, dtype="bfloat16"),
    Case("DoRA embedding", {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
    Case("bias of B", {"target_modules": ["q_proj"], "lora_bias": True}),
    Case("trained biases", {"target_modules": ["q_proj"], "bias": "all"}, told=True),
    Case("trained biases of layers", {"target_modules": ["q_proj"], "bias": "lora_only"}, told=True),
    Case("embedding", {"target_modules": ["embed_tokens", "q_proj"]}),
    Case("output layer", {"target_modules": ["lm_head", "q_proj"]}),
    Case("whole modules", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    Case("value head", {"target_modules": ATTENTION, "task_type": "TOKEN_CLS"}, model="qwen2_tokens"),
    Case("rows", {"target_modules": ["q_proj"], "trainable_token_indices": [7, 3, 30]}, told=True),
    Case("rows, tied", {"target_modules": ["q_proj"], "trainable_token_indices": [0, 36]}, told=True, tied=True),
    Case("Conv1D", {"target_modules": ["c_attn", "c_proj"]}, model="gpt2"),
    Case("Conv1D DoRA", {"target_modules": ["c_attn"], "use_dora": True}, model="gpt2"),
    Case(
        "experts",
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
        model="qwen3_moe",
    ),
    Case(
        "one parameter of the experts",
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"], "r": 2},
        model="qwen3_moe",
    ),
    Case(
        "experts, router, ranks",
        {
            "target_modules": [],
            "r": 4,
            "target_parameters": ["mlp.gate.weight", "experts.gate_up_proj", "experts.down_proj"],
            "rank_pattern": {"experts.down_proj": 2},
            "alpha_pattern": {"layers.1.mlp.experts.gate_up_proj": 3},
        },
        model="qwen3_moe",
        told=True,
    ),
    Case(
        "gate and up of experts, which PEFT adapts as one",
        {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
        model="qwen3_moe",
    ),
    Case("PiSSA", {"target_modules": ATTENTION, "init_lora_weights": "pissa"}, told=True),
]


def make(case: Case) -> oracle.Trained:
    import torch

    original = oracle.build(case.model, tied=case.tied).to(getattr(torch, case.dtype))
    lora = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM"} | case.lora
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return oracle.train(original, peft.LoraConfig(**lora))


def divide(case: Case, trained: oracle.Trained, disk: Disk, options: MergeOptions | None = None) -> Split:
    told: dict[str, Any] = {"r": case.lora.get("r", 4), "lora_alpha": 6, "task_type": "TaskType.CAUSAL_LM"}
    told["task_type"] = case.lora.get("task_type", told["task_type"])
    tensors = oracle.store(trained.state(), disk)
    config = trained.original.config.to_dict()
    result = split(
        oracle.checkpoint(tensors, trained.config() if case.told else told, config=config),
        tensors,
        options or MergeOptions(),
    )
    assert result.problems == ()
    return result


@pytest.fixture(params=CASES, ids=lambda case: case.label)
def case(request: pytest.FixtureRequest) -> Case:
    chosen: Case = request.param
    return chosen


def test_adapter_tensors_are_what_peft_saves(case: Case) -> None:
    trained, disk = make(case), Disk()
    found = divide(case, trained, disk).adapters[0].tensors
    expected = peft.get_peft_model_state_dict(trained.model)
    assert set(found) == set(expected)
    assert all(oracle.same_bits(disk.assemble(tensor), expected[name]) for name, tensor in found.items())


def test_base_is_the_model_before_training(case: Case) -> None:
    trained, disk = make(case), Disk()
    found = divide(case, trained, disk).base
    expected = trained.original.state_dict()
    assert list(found) == list(expected)
    if case.label != "PiSSA":
        assert all(oracle.same_bits(disk.assemble(tensor), expected[name]) for name, tensor in found.items())


def test_peft_loads_the_adapter_onto_the_base(case: Case, tmp_path: Path) -> None:
    trained, disk = make(case), Disk()
    result = divide(case, trained, disk)
    directory = oracle.write(result.adapters[0], disk, tmp_path / "adapter")
    base = oracle.build(case.model, tied=case.tied).to(trained.original.dtype)
    base.load_state_dict({name: oracle.to_torch(disk.assemble(tensor)) for name, tensor in result.base.items()})
    loaded = peft.PeftModel.from_pretrained(base, directory).eval()
    expected, found = trained.state(), dict(loaded.state_dict())
    assert set(found) == set(expected)
    assert all(oracle.same_bits(oracle.to_numpy(value), expected[name]) for name, value in found.items())
    assert oracle.logits(loaded).equal(oracle.logits(trained.model))


def test_fused_weights_are_those_of_merge_and_unload(case: Case) -> None:
    trained, disk = make(case), Disk()
    fused = fuse_all(divide(case, trained, disk, MergeOptions(fuse_lora=True, tie_embeddings=False)))
    assert fused.problems == ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged = trained.model.float().merge_and_unload().state_dict()
    assert list(fused.tensors) == list(merged)
    for name, value in fused.tensors.items():
        found, expected = oracle.evaluate(value, disk), oracle.to_numpy(merged[name])
        if case.dtype == "bfloat16":
            expected = expected.astype(found.dtype)
            tolerance = 2**-8
        else:
            tolerance = 2e-6
        if isinstance(value, Computed):
            assert np.allclose(found.astype(np.float64), expected.astype(np.float64), rtol=tolerance, atol=1e-6), name
        else:
            assert found.tobytes() == expected.tobytes(), name


def test_some_tensors_are_fused(case: Case) -> None:
    fused = fuse_all(divide(case, make(case), Disk()))
    assert any(isinstance(value, Computed) for value in fused.tensors.values())


def test_several_adapters_come_out_apart(tmp_path: Path) -> None:
    first = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"])
    second = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "o_proj"], modules_to_save=["lm_head"])
    trained, disk = oracle.train(oracle.build("qwen2"), first, second, names=("default", "math")), Disk()
    tensors = oracle.store(trained.state(), disk)
    told = {name: trained.config(name) for name in ("default", "math")}
    result = split(oracle.checkpoint(tensors, told), tensors, MergeOptions())
    assert result.problems == ()
    assert [adapter.name for adapter in result.adapters] == ["default", "math"]
    for adapter in result.adapters:
        expected = peft.get_peft_model_state_dict(trained.model, adapter_name=adapter.name)
        assert set(adapter.tensors) == set(expected)
        assert all(oracle.same_bits(disk.assemble(t), expected[name]) for name, t in adapter.tensors.items())
        directory = oracle.write(adapter, disk, tmp_path / adapter.name)
        loaded = peft.PeftModel.from_pretrained(oracle.build("qwen2"), directory).eval()
        trained.model.set_adapter(adapter.name)
        assert oracle.logits(loaded).equal(oracle.logits(trained.model))


def load_alone(tensors: Mapping[str, Tensor], disk: Disk, directory: Path) -> Any:
    """The model with the adapter that tensors without a base make, loaded by PEFT."""
    told = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM"}
    result = split(oracle.checkpoint(tensors, told), tensors, MergeOptions())
    assert result.problems == ()
    assert result.base == {}
    adapter = oracle.write(result.adapters[0], disk, directory / "adapter")
    return peft.PeftModel.from_pretrained(oracle.build("qwen2"), adapter).eval()


def test_only_the_lora_tensors_were_saved(tmp_path: Path) -> None:
    trained, disk = make(CASES[2]), Disk()
    tensors = {name: t for name, t in oracle.store(trained.state(), disk).items() if "lora_" in name}
    loaded = load_alone(tensors, disk, tmp_path)
    assert oracle.logits(loaded).equal(oracle.logits(trained.model))


def test_the_adapters_file_was_saved_in_shards(tmp_path: Path) -> None:
    """`get_peft_model_state_dict` through FSDP: file names, without the adapter's name."""
    trained, disk = make(next(case for case in CASES if case.label == "whole modules")), Disk()
    tensors = oracle.store(peft.get_peft_model_state_dict(trained.model), disk)
    loaded = load_alone(tensors, disk, tmp_path)
    assert oracle.logits(loaded).equal(oracle.logits(trained.model))


def test_an_injected_adapter_has_no_prefix() -> None:
    """Transformers' `add_adapter`: live names lack `base_model.model.`, the file has it."""
    trained, disk = make(CASES[0]), Disk()
    tensors = {
        name.removeprefix("base_model.model."): tensor for name, tensor in oracle.store(trained.state(), disk).items()
    }
    told = {"r": 4, "lora_alpha": 6, "task_type": None}
    result = split(oracle.checkpoint(tensors, told), tensors, MergeOptions())
    assert set(result.base) == set(trained.original.state_dict())
    assert set(result.adapters[0].tensors) == set(peft.get_peft_model_state_dict(trained.model))


@pytest.mark.parametrize("dora", [False, True])
def test_fused_convolutions_are_those_of_merge_and_unload(dora: bool) -> None:
    import torch

    torch.manual_seed(3)
    original = torch.nn.ModuleDict({"conv": torch.nn.Conv2d(3, 6, (2, 3)), "line": torch.nn.Conv1d(4, 5, 3)})
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["conv", "line"], use_dora=dora)
    trained, disk = oracle.train(original, config), Disk()
    tensors = oracle.store(trained.state(), disk)
    told = {"r": 2, "lora_alpha": 6}
    fused = fuse_all(split(oracle.checkpoint(tensors, told), tensors, MergeOptions(fuse_lora=True)))
    assert fused.problems == ()
    merged = trained.model.merge_and_unload().state_dict()
    for name in ("conv.weight", "line.weight"):
        assert isinstance(fused.tensors[name], Computed)
        found = oracle.evaluate(fused.tensors[name], disk)
        assert found.shape == tuple(merged[name].shape)
        assert np.allclose(found, oracle.to_numpy(merged[name]), rtol=2e-6, atol=1e-6)


def test_fused_packs_can_be_taken_apart() -> None:
    """A pack of experts is fused, then split into gate and up of each expert, with the same values."""
    case = next(case for case in CASES if case.label == "experts")
    disk = Disk()
    fused = fuse_all(divide(case, make(case), disk))
    packed = fused.tensors["model.layers.1.mlp.experts.gate_up_proj"]
    assert isinstance(packed, Computed)
    whole = oracle.evaluate(packed, disk)
    for expert in range(packed.shape[0]):
        one = packed.select(0, expert)
        gate, up = one.slice(0, 0, 12), one.slice(0, 12, 24)
        assert np.array_equal(oracle.evaluate(one, disk), whole[expert])
        assert np.array_equal(oracle.evaluate(gate, disk), whole[expert, :12])
        assert np.array_equal(oracle.evaluate(up.slice(1, 3, 9), disk), whole[expert, 12:, 3:9])
