"""Where runs leave the adapters of Megatron-Bridge: beside no base model, in verl's layouts, in Bridge's iterations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from unshard.cli import main

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402

from megatron.adapters import lora  # noqa: E402
from megatron.chunks import Piece, save_pieces  # noqa: E402
from megatron.cutting import cut_of  # noqa: E402
from megatron.from_hf.llama import to_megatron  # noqa: E402
from megatron.writer import write_torch_dist  # noqa: E402

pytestmark = pytest.mark.torch

State = dict[str, torch.Tensor]
CONFIG = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 32, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
}  # fmt: skip
A = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
STORED_A = "decoder.layers.1.mlp.linear_fc2.adapter.linear_in.weight"


@pytest.fixture(scope="module")
def base() -> State:
    torch.manual_seed(3)
    config = transformers.Qwen3Config(**CONFIG)
    model = transformers.AutoModelForCausalLM.from_config(config)
    return to_megatron({name: value.detach() for name, value in model.state_dict().items()}, config)


@pytest.fixture
def adapters(base: State) -> State:
    return lora(base)


def write_config(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))


def write_other_states(directory: Path) -> None:
    """A distributed checkpoint without weights, where verl keeps what belongs to the optimizer."""
    directory.mkdir(parents=True)
    save_pieces(directory, [Piece("optimizer.state.exp_avg.x", (4,), (0,), torch.zeros(4), 0)], {})
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    torch.save({"iteration": 1}, directory / "common.pt")


def write_files(role: Path, base: State, adapters: State, *, tp: int = 2, prefix: str = "") -> None:
    """The `adapter_checkpoint` of verl: each rank's own pieces, by their names in the model that training wrapped."""
    (role / "adapter_checkpoint").mkdir(parents=True)
    for rank in range(tp):
        state = {prefix + name: _piece(name, base | adapters, rank, tp) for name in adapters}
        torch.save({"adapter_state_dict": state}, role / f"adapter_checkpoint/mp_rank_{rank:02d}_adapter.pt")


def _piece(name: str, full: State, rank: int, tp: int) -> torch.Tensor:
    cut = cut_of(name, full)
    assert cut is not None
    return cut.piece(full[name], rank, tp).clone()


def merge(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    """(exit code, what was said)"""
    code = main(["merge", *[str(argument) for argument in arguments]])
    said = capsys.readouterr()
    return code, said.out + said.err


def adapter_in(output: Path) -> tuple[State, dict[str, Any]]:
    return load_file(output / "adapter_model.safetensors"), json.loads((output / "adapter_config.json").read_text())


class TestFiles:
    @pytest.mark.parametrize("prefix", ["", "module.", "module.module."])
    def test_without_a_base_model(
        self, prefix: str, base: State, adapters: State, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """What verl saves of a LoRA run that it builds with a bridge: all but the base model, which does not change."""
        role = tmp_path / "global_step_1/actor"
        write_other_states(role / "dist_ckpt")
        write_config(role / "huggingface")
        write_files(role, base, adapters, prefix=prefix)
        code, said = merge(capsys, tmp_path, tmp_path / "out", "--lora-alpha", "8", "--backend", "megatron")
        assert code == 0, said
        assert "no base model lies beside them" in said
        tensors, settings = adapter_in(tmp_path / "out")
        assert torch.equal(tensors[A], adapters[STORED_A])
        assert (settings["r"], settings["lora_alpha"]) == (4, 8)
        code, said = merge(capsys, role, tmp_path / "fused", "--lora-alpha", "8", "--fuse-lora")
        assert code != 0
        assert "no base weights to fuse it into" in said
        assert not (tmp_path / "fused").exists()

    def test_alpha_is_asked_for(
        self, base: State, adapters: State, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_config(tmp_path / "actor/huggingface")
        write_files(tmp_path / "actor", base, adapters)
        code, said = merge(capsys, tmp_path / "actor/adapter_checkpoint", tmp_path / "out")
        assert code != 0
        assert "--lora-alpha N" in said
        assert not (tmp_path / "out").exists()

    def test_a_missing_rank(
        self, base: State, adapters: State, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """With the sizes that verl recorded; without them, the files that are there look like all there are."""
        role = tmp_path / "actor"
        write_config(role / "huggingface")
        write_files(role, base, adapters)
        (role / "transformer_config.json").write_text('{"tensor_model_parallel_size": 2, "num_layers": 2}')
        (role / "adapter_checkpoint/mp_rank_01_adapter.pt").unlink()
        code, said = merge(capsys, role, tmp_path / "out", "--lora-alpha", "8")
        assert code != 0
        assert "no mp_rank_01_adapter.pt" in said

    def test_a_rank_missing_that_nothing_recorded(
        self, base: State, adapters: State, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The matrices are too small for the model then."""
        write_config(tmp_path / "actor/huggingface")
        write_files(tmp_path / "actor", base, adapters)
        (tmp_path / "actor/adapter_checkpoint/mp_rank_01_adapter.pt").unlink()
        code, said = merge(capsys, tmp_path / "actor", tmp_path / "out", "--lora-alpha", "8")
        assert code != 0
        assert "adapters do not fit the matrices that they adapt" in said


class TestShards:
    def test_of_verl_beside_the_export_for_peft(
        self, base: State, adapters: State, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The exported adapter_config.json tells alpha; the shards are read, from which training goes on."""
        role = tmp_path / "actor"
        write_torch_dist(role / "model/dist_ckpt", adapters, tp=2, iteration=None)
        write_config(role / "model/huggingface")
        export = role / "model/huggingface/adapter"
        export.mkdir()
        facts = {"peft_type": "LORA", "r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "k_proj", "v_proj"]}
        (export / "adapter_config.json").write_text(json.dumps(facts))
        code, said = merge(capsys, role, tmp_path / "out", "--backend", "megatron")
        assert code == 0, said
        assert "target_modules corrected" in said
        tensors, settings = adapter_in(tmp_path / "out")
        assert torch.equal(tensors[A], adapters[STORED_A])
        assert settings["lora_alpha"] == 12
        expected = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
        assert settings["target_modules"] == expected

    def test_the_export_alone(self, adapters: State, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """A PEFT directory goes through as it is."""
        made = tmp_path / "made"
        write_torch_dist(made, adapters, tp=2, iteration=None)
        write_config(tmp_path / "config")
        assert merge(capsys, made, tmp_path / "peft", "--config", tmp_path / "config", "--lora-alpha", "8")[0] == 0
        role = tmp_path / "actor"
        write_config(role / "model/huggingface")
        shutil.copytree(tmp_path / "peft", role / "model/huggingface/adapter")
        code, said = merge(capsys, role, tmp_path / "out", "--backend", "megatron")
        assert code == 0, said
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "peft" / name).read_bytes()

    def test_of_bridge_with_its_settings(
        self, adapters: State, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        pytest.importorskip("yaml")
        place = write_torch_dist(tmp_path / "run", adapters, tp=2)
        write_config(tmp_path / "config")
        settings = place / "run_config.yaml"
        settings.write_text(
            "model: {num_layers: 2}\npeft: {_target_: megatron.bridge.peft.lora.LoRA, alpha: 9, dim: 4}\n"
        )
        code, said = merge(capsys, tmp_path / "run", tmp_path / "out", "--config", tmp_path / "config")
        assert code == 0, said
        assert "run_config.yaml" in said
        assert adapter_in(tmp_path / "out")[1]["lora_alpha"] == 9
        settings.write_text("peft: {alpha: 9, dim: 16}\n")
        code, said = merge(capsys, tmp_path / "run", tmp_path / "no", "--config", tmp_path / "config")
        assert code != 0
        assert "run_config.yaml says r = 16, but the adapter's tensors have rank 4" in said

    def test_layers_without_adapters_are_no_missing_layers(
        self, adapters: State, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        first = {name: tensor for name, tensor in adapters.items() if ".layers.0." in name}
        write_torch_dist(tmp_path / "run", first, homogeneous=False, args={"num_layers": 2})
        write_config(tmp_path / "config")
        options = ["--config", tmp_path / "config", "--lora-alpha", "8"]
        code, said = merge(capsys, tmp_path / "run", tmp_path / "out", *options)
        assert code == 0, said
        assert len(adapter_in(tmp_path / "out")[0]) == len(first) + 6
        assert all(".layers.0." in name for name in adapter_in(tmp_path / "out")[0])
