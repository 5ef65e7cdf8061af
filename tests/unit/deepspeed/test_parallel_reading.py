"""Golden checkpoints of DeepSpeed's parallelisms, broken in the ways that people break them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from assembled import gather
from unshard.checkpoint import Checkpoint
from unshard.formats.deepspeed.states import ModelStates
from unshard.opening import open_checkpoint
from unshard.options import MergeOptions

Copy = Callable[[str], Path]


@pytest.fixture
def copy(committed_golden: Path, tmp_path: Path) -> Copy:
    """Copies the tag's directory of a committed case."""

    def of(case: str) -> Path:
        source = next((committed_golden / f"deepspeed_{case}" / "ckpt").glob("global_step*"))
        return Path(shutil.copytree(source, tmp_path / case / source.name))

    return of


def read(path: Path, **options: object) -> tuple[Checkpoint, str]:
    """The checkpoint, and the text of all its problems."""
    checkpoint = open_checkpoint(path, MergeOptions(**options))  # type: ignore[arg-type]
    return checkpoint, "\n".join(str(problem) for problem in checkpoint.problems)


def values(checkpoint: Checkpoint) -> Mapping[str, bytes]:
    return {name: gather(tensor, checkpoint.roots) for name, tensor in checkpoint.tensors.items()}


def test_missing_files_of_experts_are_named(copy: Copy) -> None:
    """A MoE checkpoint without some expert's file is no model: it is said which file, not a KeyError."""
    place = copy("moe_ep2_w4")
    (place / "layer_1_expert_2_mp_rank_00_model_states.pt").unlink()
    _, found = read(place)
    assert "1 of 8 files of experts is missing: no layer_1_expert_2_mp_rank_00_model_states.pt" in found


@pytest.mark.parametrize("weights", ["master", "model"])
def test_without_any_file_of_experts_all_are_missing(copy: Copy, weights: str) -> None:
    place = copy("moe_ep2_w4")
    for file in place.glob("layer_*_expert_*"):
        file.unlink()
    _, found = read(place, weights=weights)
    assert "8 of 8 files of experts are missing" in found


def test_without_optimizer_states_experts_come_from_their_files(copy: Copy) -> None:
    place = copy("moe_ep2_w4")
    whole, found = read(place, weights="model")
    assert found == ""
    for file in place.glob("*optim_states.pt"):
        file.unlink()
    alone, found = read(place)
    assert found == ""
    assert values(alone) == values(whole)
    assert len([name for name in alone.tensors if "deepspeed_experts" in name]) == 32


def test_the_order_of_expert_ranks_follows_the_configuration(copy: Copy) -> None:
    """Both orders of four ranks hold what their files say, so that neither is read as the other."""
    for case in ("moe_ep2_w4", "moe_ep2_w4_data_first"):
        place = copy(case)
        masters, low = read(place)[0], read(place, weights="model")[0]
        for name, tensor in low.tensors.items():
            rounded = masters.tensors[name].cast(tensor.dtype)
            assert gather(rounded, masters.roots) == gather(tensor, low.roots), name


def test_missing_files_of_layers_are_named(copy: Copy) -> None:
    place = copy("pipeline_pp2")
    (place / "layer_03-model_states.pt").unlink()
    _, found = read(place)
    assert "1 of 5 files of layers is missing: no layer_03" in found


def test_missing_model_parallel_ranks_are_named(copy: Copy) -> None:
    for case, rank in (("autotp_tp2", "01"), ("pipeline_pp2", "00")):
        place = copy(case)
        (place / f"mp_rank_{rank}_model_states.pt").unlink()
        _, found = read(place)
        assert f"1 of 2 model-parallel ranks is missing: no mp_rank_{rank}_model_states.pt" in found


def test_masters_of_a_stage_that_are_missing_are_named(copy: Copy) -> None:
    place = copy("pipeline_pp2_tied_w4")
    (place / "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt").unlink()
    _, found = read(place)
    assert "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt" in found


def test_a_tied_embedding_has_replicas_on_both_stages(copy: Copy) -> None:
    checkpoint, found = read(copy("pipeline_pp2_tied_w4"))
    assert found == ""
    files = {chunk.extent.file.path for chunk in checkpoint.tensors["model.embed_tokens.weight"].chunks}
    assert {file.partition("_mp_rank_")[2][:2] for file in files} == {"00", "01"}
    assert "lm_head.weight" not in checkpoint.tensors


def test_megatron_deepspeed_is_of_megatrons_dialect(copy: Copy) -> None:
    checkpoint, found = read(copy("megatron_tp2pp2"))
    assert found == ""
    assert checkpoint.dialect == "megatron"
    assert checkpoint.facts["num_query_groups"] == 2
    assert checkpoint.facts["normalization"] == "RMSNorm"
    assert ("tp", 2) in checkpoint.mesh
    assert ("pp", 2) in checkpoint.mesh


@pytest.mark.parametrize("weights", ["master", "model"])
def test_the_files_of_one_tensor_rank_alone_are_not_a_model(copy: Copy, weights: str) -> None:
    place = copy("megatron_tp2pp2")
    for file in [*place.glob("layer_*-model_01-*")]:
        file.unlink()
    _, found = read(place, weights=weights)
    assert "5 of 10 files of layers are missing: no layer_01-model_01-model_states.pt" in found


def test_files_of_experts_are_read_where_others_stop_at_them(copy: Copy) -> None:
    """`layer_0_expert_0_mp_rank_00_model_states.pt` and `expp_rank_*` are names that converters do not know."""
    place = copy("moe_ep2_w4")
    optimizer = next(place.glob("*optim_states.pt"))
    shutil.copy(optimizer, place / "expp_rank_0_mp_rank_00_optim_states.pt")
    checkpoint, found = read(place)
    assert found == ""
    experts = {name.split(".")[5] for name in checkpoint.tensors if "deepspeed_experts" in name}
    assert experts == {"0", "1", "2", "3"}


def test_without_a_configuration_the_order_of_expert_ranks_is_said(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    """`deepspeed.initialize(config="ds.json")` saves the path alone."""
    place = copy("moe_ep2_w4")
    whole, _ = read(place)
    assert not [note for note in whole.notes if note.level == "warning"]
    monkeypatch.setattr(ModelStates, "config", property(lambda _states: {}))
    alone, found = read(place)
    assert found == ""
    assert values(alone) == values(whole)
    assert [note.text for note in alone.notes if note.level == "warning" and "use_data_before_expert" in note.text]
