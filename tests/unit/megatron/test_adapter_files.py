"""LoRA adapters as verl first saved them: the ranks' files become full matrices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from assembled import gather
from unshard.errors import FormatError, NotACheckpointError, UnshardError
from unshard.formats.contract import Source
from unshard.formats.megatron.adapter_files import VerlAdapter
from unshard.formats.megatron.adapter_reading import read_adapter_files
from unshard.locate import locate

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

LAYERS, HIDDEN, WIDTH, RANK, HEADS, GROUPS = 4, 16, 24, 4, 4, 2
SHAPES = {
    "self_attention.linear_qkv": ((HEADS + 2 * GROUPS) * 4, HIDDEN),
    "self_attention.linear_proj": (HIDDEN, HIDDEN),
    "mlp.linear_fc1": (2 * WIDTH, HIDDEN),
    "mlp.linear_fc2": (HIDDEN, WIDTH),
}
FACTS = {"num_layers": LAYERS, "gated_linear_unit": True}


def adapters(modules: tuple[str, ...] = tuple(SHAPES)) -> dict[str, torch.Tensor]:
    """The whole adapters of a model, under canonical names."""
    generator = torch.Generator().manual_seed(7)
    full: dict[str, torch.Tensor] = {}
    for layer in range(LAYERS):
        for module in modules:
            rows, columns = SHAPES[module]
            at = f"decoder.layers.{layer}.{module}.adapter"
            full[f"{at}.linear_in.weight"] = torch.randn(RANK, columns, generator=generator)
            full[f"{at}.linear_out.weight"] = torch.randn(rows, RANK, generator=generator)
    return full


def cut(name: str, tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """What a tensor-parallel rank holds (Megatron-Bridge, `peft/utils.py`)."""
    if name.endswith("linear_in.weight"):
        return tensor.chunk(ranks, 1 if "linear_proj" in name or "linear_fc2" in name else 0)[rank].clone()
    if "linear_fc1" in name:
        return torch.cat([half.chunk(ranks, 0)[rank] for half in tensor.chunk(2, 0)])
    return tensor.chunk(ranks, 0)[rank].clone()


def save(directory: Path, full: dict[str, torch.Tensor], *, tp: int = 1, pp: int = 1, vpp: int = 1) -> Path:
    """`adapter_checkpoint` of a run of these sizes: the first virtual stage of each rank."""
    place = directory / "adapter_checkpoint"
    place.mkdir(parents=True)
    each = LAYERS // (pp * vpp)
    for stage in range(pp):
        for rank in range(tp):
            state = {}
            for name, tensor in full.items():
                layer = int(name.split(".")[2])
                if layer // each == stage:
                    state[name.replace(f".{layer}.", f".{layer % each}.", 1)] = cut(name, tensor, rank, tp)
            file = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else "") + "_adapter.pt"
            torch.save({"adapter_state_dict": state}, place / file)
    return place


class TestRanks:
    @pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 4)])
    def test_they_become_whole(self, tp: int, pp: int, tmp_path: Path) -> None:
        full = adapters()
        place = save(tmp_path, full, tp=tp, pp=pp)
        facts = FACTS | {"pipeline_model_parallel_size": pp}
        (tmp_path / "transformer_config.json").write_text(json.dumps(facts))
        found = VerlAdapter().read(Source(place))
        assert not found.problems
        assert found.tensors.keys() == full.keys()
        for name, tensor in found.tensors.items():
            assert gather(tensor, found.roots) == full[name].numpy().tobytes(), name
        assert dict(found.mesh) == {key: size for key, size in (("tp", tp), ("pp", pp)) if size > 1}

    def test_the_mlp_without_its_second_matrix(self, tmp_path: Path) -> None:
        """Whether fc1 has gates is recorded; the shape of fc2 is not there."""
        full = adapters(("mlp.linear_fc1",))
        found = read_adapter_files(save(tmp_path, full, tp=2), FACTS)
        for name, tensor in found.tensors.items():
            assert gather(tensor, {"adapter": tmp_path / "adapter_checkpoint"}) == full[name].numpy().tobytes()

    def test_virtual_stages_are_lost_and_that_is_said(self, tmp_path: Path) -> None:
        """Of each rank, verl saves the first virtual stage only."""
        place = save(tmp_path, adapters(), pp=2, vpp=2)
        facts = FACTS | {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
        found = read_adapter_files(place, facts)
        assert not found.problems
        assert {name.split(".")[2] for name in found.tensors} == {"0", "1"}
        assert [note.level for note in found.notes] == ["warning"]
        assert "of layers 2-3 are not in the checkpoint" in found.notes[0].text

    @pytest.mark.parametrize("level", [".", "adapter_checkpoint", "adapter_checkpoint/mp_rank_01_adapter.pt"])
    def test_from_every_level(self, level: str, tmp_path: Path) -> None:
        save(tmp_path, adapters(), tp=2)
        found, place = locate(tmp_path / level)
        assert found.name == "megatron_adapter"
        assert len(found.read(Source(place)).tensors) == 2 * LAYERS * len(SHAPES)


class TestTrouble:
    def messages(self, place: Path, facts: dict[str, object]) -> str:
        return "\n".join([problem.message for problem in read_adapter_files(place, facts).problems])

    def test_a_missing_rank(self, tmp_path: Path) -> None:
        place = save(tmp_path, adapters(), tp=2)
        (place / "mp_rank_01_adapter.pt").unlink()
        assert "no mp_rank_01_adapter.pt" in self.messages(place, FACTS | {"tensor_model_parallel_size": 2})

    def test_stages_of_unknown_length(self, tmp_path: Path) -> None:
        full = {name: tensor for name, tensor in adapters().items() if ".layers.3." not in name}
        place = save(tmp_path, full, pp=2)
        assert "nothing tells how many layers each stage has" in self.messages(place, {"gated_linear_unit": True})

    def test_more_layers_than_recorded(self, tmp_path: Path) -> None:
        place = save(tmp_path, adapters(), pp=2)
        facts = {"num_layers": 2, "gated_linear_unit": True, "pipeline_model_parallel_size": 2}
        assert "recorded 1 layers on pipeline stage 0, but its file numbers them to 1" in self.messages(place, facts)

    @pytest.mark.parametrize("content", [{}, {"adapter_state_dict": {}}, {"adapter_state_dict": {"a": 1}}, [1]])
    def test_files_of_other_contents(self, content: object, tmp_path: Path) -> None:
        place = save(tmp_path, adapters())
        torch.save(content, place / "mp_rank_00_adapter.pt")
        with pytest.raises(FormatError, match="mp_rank_00_adapter"):
            read_adapter_files(place, FACTS)

    def test_an_empty_place(self, tmp_path: Path) -> None:
        with pytest.raises(NotACheckpointError):
            read_adapter_files(tmp_path, FACTS)

    def test_a_damaged_file_among_others(self, tmp_path: Path) -> None:
        place = save(tmp_path, adapters(), tp=2)
        (place / "mp_rank_01_adapter.pt").write_bytes(b"PK\x03\x04")
        found = read_adapter_files(place, FACTS)
        assert any(isinstance(problem, FormatError) for problem in found.problems)
        assert all(isinstance(problem, UnshardError) for problem in found.problems)


class TestMerging:
    def test_base_and_adapters_in_one_catalog(self, tmp_path: Path) -> None:
        """The base in `dist_ckpt`, the adapters beside it: a model and its PEFT adapter come out."""
        transformers = pytest.importorskip("transformers")
        from safetensors.torch import load_file

        from megatron.checking import random_model, read_model
        from megatron.from_hf.llama import to_megatron
        from megatron.writer import write_torch_dist
        from unshard.cli import main

        settings = transformers.Qwen3Config(
            vocab_size=32, hidden_size=HIDDEN, intermediate_size=WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=GROUPS, head_dim=4,
        )  # fmt: skip
        model = random_model(settings)
        model.save_pretrained(tmp_path / "actor/huggingface")
        state = read_model(tmp_path / "actor/huggingface")
        (tmp_path / "actor/huggingface/model.safetensors").unlink()
        write_torch_dist(tmp_path / "actor/dist_ckpt", to_megatron(state, settings), tp=2, iteration=None)
        full = adapters()
        save(tmp_path / "actor", full, tp=2)
        output = tmp_path / "out"
        assert main(["merge", str(tmp_path / "actor"), str(output), "--lora-alpha", "8", "--backend", "megatron"]) == 0
        found = read_model(output)
        assert all(torch.equal(found[name], state[name]) for name in state)
        peft = load_file(output / "lora_adapter/adapter_model.safetensors")
        at = "base_model.model.model.layers.2.self_attn"
        rows = full["decoder.layers.2.self_attention.linear_qkv.adapter.linear_out.weight"].unflatten(0, (GROUPS, -1))
        assert torch.equal(peft[f"{at}.q_proj.lora_B.weight"], rows[:, :8].flatten(0, 1))
        assert torch.equal(peft[f"{at}.v_proj.lora_B.weight"], rows[:, 12:].flatten(0, 1))
        one = full["decoder.layers.2.self_attention.linear_qkv.adapter.linear_in.weight"]
        assert torch.equal(peft[f"{at}.k_proj.lora_A.weight"], one)
