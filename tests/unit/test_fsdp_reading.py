"""Whole FSDP checkpoints: the committed golden ones as they are, and broken in every way that people break them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import golden_set
from assembled import gather
from format_contract import check_format
from unshard.checkpoint import Checkpoint
from unshard.errors import FormatError, IncompleteError, NotACheckpointError
from unshard.formats.contract import Source
from unshard.formats.fsdp import Fsdp
from unshard.formats.safetensors_file import read_header
from unshard.opening import open_checkpoint
from unshard.options import MergeOptions
from unshard.plan.coverage import prove_coverage
from unshard.tensors import SourceFile

Copy = Callable[[str], Path]


@pytest.fixture
def copy(committed_golden: Path, tmp_path: Path) -> Copy:
    """Copies the checkpoint of a committed case, to be broken."""

    def of(case: str) -> Path:
        return Path(shutil.copytree(committed_golden / case / "ckpt", tmp_path / case))

    return of


def read(path: Path, *also: Path) -> Checkpoint:
    return Fsdp().read(Source(path, also))


def messages(checkpoint: Checkpoint) -> str:
    return "\n".join(str(problem) for problem in checkpoint.problems)


def rank_file(directory: Path, rank: int, world: int) -> Path:
    return directory / f"model_world_size_{world}_rank_{rank}.pt"


def truth_of(directory: Path) -> dict[str, bytes]:
    file = directory / "model.safetensors"
    tensors = read_header(file, SourceFile("truth", file.name)).tensors
    return {name: gather(tensor, {"truth": directory}) for name, tensor in tensors.items()}


def all_cases() -> list[golden_set.GoldenCase]:
    cases = [*golden_set.committed_cases(), *golden_set.larger_cases()]
    kept = [case for case in cases if not case.name.startswith((*golden_set.MEGATRON_KINDS, "dcp_zstd"))]
    whole = [case for case in kept if "excluded" not in case.name and "exclfrozen" not in case.name]
    return [case for case in whole if (case.directory / "truth" / "model.safetensors").is_file()]


RENAMED = ("lora", "moe", "mixtral", "vl", "wrapped")
"""Words in names of cases whose stored names are not those of the truth: families and adapters are tested elsewhere."""


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_the_catalog_holds_the_truth(case: golden_set.GoldenCase) -> None:
    """Every tensor whose stored name is the output's has the truth's bytes; every tensor is covered."""
    options = MergeOptions(
        also=tuple(sorted(case.directory.glob("ckpt/node[1-9]"))),
        shapes_from=case.directory / "truth" if "unknown_family" in case.name else None,
    )
    checkpoint = open_checkpoint(case.source, options)
    assert messages(checkpoint) == ""
    for tensor in checkpoint.tensors.values():
        assert prove_coverage(tensor) == []
    truth = truth_of(case.directory / "truth")
    common = truth.keys() & checkpoint.tensors.keys()
    assert {name for name in common if gather(checkpoint.tensors[name], checkpoint.roots) != truth[name]} == set()
    if not any(word in case.name for word in RENAMED):
        assert common == truth.keys()


@pytest.mark.parametrize(
    "case",
    ["fsdp2_w4", "fsdp2_tp", "fsdp1_sharded_tensor", "fsdp1_full", "layout_accelerate_sharded", "layout_rank_files"],
)
def test_the_contract_of_formats(case: str, committed_golden: Path, tmp_path: Path) -> None:
    check_format(Fsdp(), committed_golden / case / "ckpt", tmp_path)


class TestTitles:
    @pytest.mark.parametrize(
        ("case", "title", "placements"),
        [
            ("fsdp2_w4", "FSDP2 DTensor, 4 ranks, mesh (fsdp=4)", {"Shard(0)": 15}),
            ("fsdp2_hsdp", "FSDP2 DTensor, 4 ranks, mesh (ddp=2, fsdp=2)", {"Replicate, Shard(0)": 12}),
            ("fsdp1_sharded_tensor", "FSDP1 ShardedTensor, 3 ranks", {"ShardedTensor": 15}),
            ("fsdp1_w1", "plain tensors, 1 rank", {"plain": 12}),
            ("fsdp2_buffers", "FSDP2 DTensor, 3 ranks, mesh (fsdp=3)", {"Shard(0)": 38, "plain": 2}),
        ],
    )
    def test_what_lies_there(self, case: str, title: str, placements: dict[str, int], committed_golden: Path) -> None:
        checkpoint = read(committed_golden / case / "ckpt")
        assert (checkpoint.title, dict(checkpoint.placements)) == (title, placements)

    def test_config_assets_and_adapter_come_from_beside_the_ranks(self, committed_golden: Path) -> None:
        checkpoint = read(committed_golden / "lora" / "ckpt")
        assert checkpoint.config is not None
        assert checkpoint.config["model_type"] == "llama"
        assert {"config.json", "tokenizer.json"} <= {asset.path for asset in checkpoint.assets}
        assert checkpoint.adapter == json.loads((committed_golden / "lora/ckpt/lora_train_meta.json").read_text())


class TestReplicatedBuffers:
    def test_plain_tensors_are_kept_once_and_never_concatenated(self, committed_golden: Path) -> None:
        """verl#7612: `layer_scalar [1] -> [8]`."""
        checkpoint = read(committed_golden / "fsdp2_buffers" / "ckpt")
        plain = [tensor for tensor in checkpoint.tensors.values() if len({chunk.box for chunk in tensor.chunks}) == 1]
        assert len(plain) == 2
        for tensor in plain:
            assert [chunk.rank for chunk in tensor.chunks] == [0, 1, 2]
            assert {chunk.box.sizes for chunk in tensor.chunks} == {tensor.shape}


class TestMissingRanks:
    def test_all_of_them_are_named_compactly(self, copy: Copy) -> None:
        """verl#625, verl#2356: 8 of 64 rank files on a node."""
        path = copy("fsdp2_w8_empty")
        for rank in (0, 3, 4, 5, 7):
            rank_file(path, rank, 8).unlink()
        (problem,) = read(path).problems
        assert isinstance(problem, IncompleteError)
        assert "ranks 0, 3-5, 7 of 8 are missing" in problem.message
        assert problem.hint is not None
        assert "--also" in problem.hint

    def test_a_single_one(self, copy: Copy) -> None:
        path = copy("fsdp2_w4")
        rank_file(path, 3, 4).unlink()
        assert "rank 3 of 4 is missing" in messages(read(path))

    def test_without_any_json_or_name_the_mesh_tells_the_world(self, copy: Copy) -> None:
        path = copy("layout_rank_files")
        (path / "fsdp_config.json").unlink()
        (path / "rank_1.pt").unlink()
        assert "rank 1 of 2 is missing" in messages(read(path))

    def test_replicas_stand_in_under_hsdp_and_a_warning_says_so(self, copy: Copy) -> None:
        path = copy("fsdp2_hsdp")
        whole = {name: gather(tensor, read(path).roots) for name, tensor in read(path).tensors.items()}
        rank_file(path, 1, 4).unlink()
        rank_file(path, 2, 4).unlink()
        checkpoint = read(path)
        assert messages(checkpoint) == ""
        (note,) = [note for note in checkpoint.notes if note.level == "warning"]
        assert "ranks 1-2 of 4 are missing" in note.text
        assert {name: gather(tensor, checkpoint.roots) for name, tensor in checkpoint.tensors.items()} == whole
        assert checkpoint.title.startswith("FSDP2 DTensor, 2 of 4 ranks")

    def test_two_replicas_of_the_same_shard_are_not_enough(self, copy: Copy) -> None:
        path = copy("fsdp2_hsdp")
        rank_file(path, 0, 4).unlink()
        rank_file(path, 2, 4).unlink()
        assert "ranks 0, 2 of 4 are missing" in messages(read(path))

    def test_sharded_tensors_with_replicas(self, copy: Copy) -> None:
        path = copy("fsdp1_sharded_tensor_hsdp")
        rank_file(path, 0, 4).unlink()
        rank_file(path, 3, 4).unlink()
        assert messages(read(path)) == ""

    def test_a_full_state_dict_needs_one_rank(self, copy: Copy) -> None:
        path = copy("fsdp1_full_rank0")
        rank_file(path, 1, 2).unlink()
        checkpoint = read(path)
        assert messages(checkpoint) == ""
        assert any("rank 1 of 2 is missing" in note.text for note in checkpoint.notes)


class TestRoots:
    def test_node_local_disks(self, committed_golden: Path) -> None:
        nodes = committed_golden / "layout_nodes" / "ckpt"
        checkpoint = read(nodes / "node0", nodes / "node1")
        assert messages(checkpoint) == ""
        files = {chunk.extent.file for tensor in checkpoint.tensors.values() for chunk in tensor.chunks}
        assert {file.root for file in files} == {"source", "also1"}

    def test_a_further_root_may_be_given_at_the_level_of_the_run(self, copy: Copy, tmp_path: Path) -> None:
        nodes = copy("layout_nodes")
        here, there = tmp_path / "a/global_step_5/actor", tmp_path / "b/global_step_5/actor"
        shutil.copytree(nodes / "node0", here)
        shutil.copytree(nodes / "node1", there)
        checkpoint = read(here, tmp_path / "b")
        assert messages(checkpoint) == ""
        assert len(checkpoint.tensors) == 12

    def test_mixed_steps_are_named(self, copy: Copy, tmp_path: Path) -> None:
        nodes = copy("layout_nodes")
        here, there = tmp_path / "a/global_step_5/actor", tmp_path / "b/global_step_10/actor"
        shutil.copytree(nodes / "node0", here)
        shutil.copytree(nodes / "node1", there)
        text = messages(read(here, there))
        assert "different training steps" in text
        assert "step 5" in text
        assert "step 10" in text

    def test_a_root_without_rank_files(self, copy: Copy, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        assert f"{tmp_path / 'empty'}: no files model_world_size_4" in messages(
            read(copy("fsdp2_w4"), tmp_path / "empty")
        )

    def test_the_same_rank_in_two_roots(self, copy: Copy, tmp_path: Path) -> None:
        path = copy("fsdp2_w4")
        other = tmp_path / "other"
        other.mkdir()
        shutil.copy(rank_file(path, 2, 4), other)
        assert "rank 2 is there twice" in messages(read(path, other))

    def test_the_same_directory_twice_is_no_problem(self, copy: Copy) -> None:
        path = copy("fsdp2_w4")
        assert messages(read(path, path)) == ""


class TestMixedUpFiles:
    def test_swapped_files(self, copy: Copy, tmp_path: Path) -> None:
        path = copy("fsdp2_w4")
        one, other = rank_file(path, 1, 4), rank_file(path, 2, 4)
        one.rename(tmp_path / "kept")
        other.rename(one)
        (tmp_path / "kept").rename(other)
        text = messages(read(path))
        assert f"{one.name} holds what rank 2 saved" in text
        assert f"{other.name} holds what rank 1 saved" in text

    @pytest.mark.parametrize("case", ["fsdp2_tp", "fsdp1_dtensor_hsdp", "fsdp1_sharded_tensor_hsdp"])
    def test_one_ranks_file_under_two_names(self, case: str, copy: Copy) -> None:
        path = copy(case)
        shutil.copy(rank_file(path, 1, 4), rank_file(path, 3, 4))
        assert f"{rank_file(path, 3, 4).name} holds what rank 1 saved" in messages(read(path))

    def test_two_names_for_one_rank(self, copy: Copy) -> None:
        path = copy("layout_rank_files")
        shutil.copy(path / "rank_1.pt", path / "rank_01.pt")
        assert "rank 1 is there twice" in messages(read(path))

    def test_mixed_worlds(self, copy: Copy) -> None:
        path = copy("fsdp2_w4")
        shutil.copy(rank_file(copy("fsdp2_qwen3_moe"), 0, 3), path)
        text = messages(read(path))
        assert "files of a world of 3 (rank 0) are mixed with those of a world of 4 (ranks 0-3)" in text

    def test_the_json_contradicts_the_names(self, copy: Copy) -> None:
        path = copy("fsdp2_w4")
        (path / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 8}')
        text = messages(read(path))
        assert "the file names say 4, fsdp_config.json says 8" in text
        assert "hint: fsdp_config.json alone differs" in text

    def test_the_mesh_contradicts_the_names(self, copy: Copy) -> None:
        path = copy("fsdp2_w4")
        (path / "fsdp_config.json").unlink()
        for rank in (0, 1):
            rank_file(path, rank, 4).rename(rank_file(path, rank, 2))
        for rank in (2, 3):
            rank_file(path, rank, 4).unlink()
        assert "the file names say 2, the tensors say 4" in messages(read(path))

    def test_names_of_a_larger_world_than_the_mesh_has(self, copy: Copy) -> None:
        """Nothing is missing then, and no rank stands in for another."""
        path = copy("fsdp2_w4")
        (path / "fsdp_config.json").unlink()
        for rank in range(4):
            rank_file(path, rank, 4).rename(rank_file(path, rank, 5))
        checkpoint = read(path)
        assert "the file names say 5, the tensors say 4" in messages(checkpoint)
        assert "missing" not in messages(checkpoint)
        assert not any("replicas" in note.text for note in checkpoint.notes)

    def test_a_rank_beyond_the_world(self, copy: Copy) -> None:
        path = copy("fsdp2_w4")
        shutil.copy(rank_file(path, 3, 4), rank_file(path, 4, 4))
        assert "rank 4 cannot be in a world of 4 ranks" in messages(read(path))

    def test_ranks_of_different_models(self, copy: Copy) -> None:
        path = copy("fsdp2_fp16_w3")
        shutil.copy(rank_file(copy("fsdp1_dtensor_tied"), 2, 3), rank_file(path, 2, 3))
        text = messages(read(path))
        assert "ranks disagree on its" in text
        assert "ranks 0-1 have no" in text


class TestDamage:
    def test_a_truncated_file_is_named_and_the_others_are_read(self, copy: Copy) -> None:
        path = copy("fsdp2_w4")
        victim = rank_file(path, 2, 4)
        victim.write_bytes(victim.read_bytes()[:2000])
        checkpoint = read(path)
        (problem,) = [problem for problem in checkpoint.problems if isinstance(problem, FormatError)]
        assert victim.name in problem.message
        assert len(checkpoint.tensors) == 15

    @pytest.mark.parametrize("name", ["fsdp_config.json", "lora_train_meta.json", "huggingface/config.json"])
    def test_malformed_side_files_are_not_taken_for_absent_ones(self, name: str, copy: Copy) -> None:
        path = copy("lora")
        (path / name).write_text("{")
        text = messages(read(path))
        assert Path(name).name in text
        assert ("delete it" in text) == (name == "fsdp_config.json")

    def test_no_config_at_all(self, copy: Copy) -> None:
        path = copy("fsdp2_w4")
        shutil.rmtree(path / "huggingface")
        checkpoint = read(path)
        assert (checkpoint.config, checkpoint.assets, messages(checkpoint)) == (None, (), "")

    def test_verl_before_it_wrote_fsdp_config_json(self, committed_golden: Path) -> None:
        """verl#2252, verl#4081: `Config …/actor/fsdp_config.json does not exist.`"""
        checkpoint = read(committed_golden / "layout_no_fsdp_config" / "ckpt")
        assert (checkpoint.world_size, messages(checkpoint)) == (2, "")

    def test_a_world_of_one_with_plain_tensors(self, committed_golden: Path) -> None:
        """verl#903: `assert isinstance(weight, DTensor)`."""
        assert messages(read(committed_golden / "fsdp1_w1" / "ckpt")) == ""


class TestSeveralGroups:
    def test_they_are_listed_and_one_file_names_its_group(self, copy: Copy, tmp_path: Path) -> None:
        source = copy("layout_rank_files")
        both = tmp_path / "both"
        both.mkdir()
        for rank in (0, 1):
            shutil.copy(source / f"rank_{rank}.pt", both / f"policy_r{rank}.pt")
            shutil.copy(source / f"rank_{rank}.pt", both / f"reward_r{rank}.pt")
        with pytest.raises(NotACheckpointError) as caught:
            read(both)
        assert "policy_r*.pt (ranks 0-1)" in str(caught.value)
        assert "reward_r*.pt (ranks 0-1)" in str(caught.value)
        assert f"unshard inspect {both / 'policy_r0.pt'}" in str(caught.value)
        checkpoint = read(both / "reward_r1.pt")
        assert messages(checkpoint) == ""
        assert {chunk.extent.file.path for tensor in checkpoint.tensors.values() for chunk in tensor.chunks} == {
            "reward_r0.pt",
            "reward_r1.pt",
        }

    def test_optimizer_and_other_states_are_left_alone(self, copy: Copy) -> None:
        path = copy("layout_rank_files")
        for name in ("optim_rank_0.pt", "st_opt_r0.pt", "extra_state_rank_1.pt", "optimizer_0_rank0.bin", "rng_r0.pt"):
            shutil.copy(path / "rank_0.pt", path / name)
        assert messages(read(path)) == ""


class TestOldTorch:
    @pytest.mark.parametrize(("version", "mesh"), [("2.1.2", "dim0"), ("2.4.1", "fsdp")])
    def test_dtensors(self, version: str, mesh: str, larger_golden: Path) -> None:
        import numpy as np

        checkpoint = read(larger_golden / "old_torch" / f"torch-{version}")
        assert messages(checkpoint) == ""
        assert checkpoint.mesh == ((mesh, 4),)
        for tensor in checkpoint.tensors.values():
            assert gather(tensor, checkpoint.roots) == np.arange(tensor.size, dtype=np.float32).tobytes()

    def test_local_and_sharded_state_dicts_of_one_model_agree(self, larger_golden: Path) -> None:
        place = larger_golden / "old_torch" / "torch-2.4.1-fsdp1"
        sharded = read(place / "st_r0.pt")
        shapes = {name: tensor.shape for name, tensor in sharded.tensors.items() if name not in ("buf", "head.weight")}
        flat = Fsdp().read(Source(place / "st_local_r0.pt", known_shapes=lambda _config: shapes))
        assert messages(flat) == ""
        assert set(flat.tensors) == {*shapes, "buf"}
        for name, tensor in flat.tensors.items():
            assert gather(tensor, flat.roots) == gather(sharded.tensors[name], sharded.roots)
