"""Faults from the field in finding and reading the pieces: which ranks, which mesh, which directory."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from field_cases import copy_case, edit_json, merge, refuse, same, truth, warnings

import unshard
from fsdp_bytes import REPLICATE, Mesh, RankFile, numbers, rank_path, world, write_json, write_ranks
from unshard.errors import IncompleteError, ModelError, NotACheckpointError


def test_fsdp_config_json_absent_world_from_names(tmp_path: Path) -> None:
    """verl#2252, verl#4081: "Config …/fsdp_config.json does not exist" of saves that never wrote it."""
    source = copy_case("fsdp2_w4", tmp_path / "actor")
    (source / "fsdp_config.json").unlink()
    report, found = merge(source, tmp_path / "out")
    assert found == truth("fsdp2_w4")
    assert "4 ranks" in report.checkpoint


def test_world_in_names_is_checked_against_the_mesh(tmp_path: Path) -> None:
    """verl#2252: where people wrote the world size by hand, it may be wrong."""
    source = write_ranks(tmp_path / "actor", world(2), {"a": numbers(4)})
    for rank in range(2):
        rank_path(source, world(2), rank).rename(rank_path(source, world(1), rank))
    error = refuse(source, tmp_path / "out", weights_only=True)
    assert "the file names say 1" in error.message
    assert "the tensors say 2" in error.message


@pytest.mark.parametrize("package", ["torch.distributed.tensor", "torch.distributed._tensor"])
@pytest.mark.parametrize("plain", [{"a", "b", "c"}, {"a"}, {"c"}])
def test_each_tensor_decides_whether_it_is_a_dtensor(plain: set[str], package: str, tmp_path: Path) -> None:
    """verl#903, EasyR1#243: a world of one has plain tensors, and one pivot key was asserted to be a DTensor."""
    tensors = {name: numbers(5, 3, start=at) for at, name in enumerate("abc")}
    file = RankFile(world(1), 0, package)
    for name, array in tensors.items():
        if name in plain:
            file.add_plain(name, array)
        else:
            file.add_shard(name, array)
    file.write(rank_path(tmp_path, world(1), 0))
    assert same(merge(tmp_path, tmp_path / "out", weights_only=True)[1], tensors)


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        (Mesh({"ddp": 2, "fsdp": 2}), (REPLICATE, 0)),
        (Mesh({"fsdp": 2, "tp": 2}), (0, 1)),
        (Mesh({"cats": 3, "dogs": 2}), (1, 0)),
        (Mesh({"pp": 2, "dp_replicate": 1, "cp": 3}), (REPLICATE, 1, 0)),
    ],
    ids=str,
)
def test_mesh_of_any_dimensions_and_names(mesh: Mesh, placements: tuple[int, ...], tmp_path: Path) -> None:
    """verl#971: "Unsupported mesh_dim_names", "FSDP + TP is not supported yet"."""
    tensors = {"a": numbers(7, 5), "b": numbers(3, 4, 2)}
    source = write_ranks(tmp_path / "actor", mesh, tensors, placements)
    report, found = merge(source, tmp_path / "out", weights_only=True, check_replicas=True)
    assert same(found, tensors)
    assert all(f"{name}={size}" in report.checkpoint for name, size in mesh.dims.items())


def test_missing_ranks_are_all_named_and_further_roots_bring_them(tmp_path: Path) -> None:
    """verl#625, verl#2356: half of the rank files lie on the disk of another node."""
    tensors = {"a": numbers(32, 2), "b": numbers(19)}
    source = write_ranks(tmp_path / "node0" / "actor", world(16), tensors)
    other = tmp_path / "node1" / "actor"
    other.mkdir(parents=True)
    for rank in (5, *range(8, 16)):
        rank_path(source, world(16), rank).rename(rank_path(other, world(16), rank))
    error = refuse(source, tmp_path / "out", weights_only=True)
    assert isinstance(error, IncompleteError)
    assert "ranks 5, 8-15 of 16 are missing" in error.message
    assert "--also" in str(error.hint)
    assert same(merge(source, tmp_path / "out", weights_only=True, also=[other])[1], tensors)


def test_hybrid_shards_of_one_node_are_enough(tmp_path: Path) -> None:
    """accelerate#3010: under HYBRID_SHARD over two nodes, each node holds all, and neither could be merged alone."""
    mesh, tensors = Mesh({"replicate": 2, "shard": 2}), {"a": numbers(5, 3)}
    source = write_ranks(tmp_path / "node0", mesh, tensors, (REPLICATE, 0))
    other = tmp_path / "node1"
    other.mkdir()
    for rank in (2, 3):
        rank_path(source, mesh, rank).rename(rank_path(other, mesh, rank))
    for number, place in enumerate((source, other)):
        report, found = merge(place, tmp_path / f"out{number}", weights_only=True)
        assert same(found, tensors)
        assert "replicas" in warnings(report)
    report, found = merge(source, tmp_path / "both", weights_only=True, also=[other])
    assert same(found, tensors)
    assert warnings(report) == ""
    rank_path(other, mesh, 3).unlink()
    assert "rank" in refuse(other, tmp_path / "half", weights_only=True).message


def test_names_that_only_some_ranks_have_are_all_told(tmp_path: Path) -> None:
    """Automodel PR#3248: rank 0 fails on a key that another rank owns, the others say "Connection closed by peer"."""
    mesh = world(3)
    for rank in range(3):
        file = RankFile(mesh, rank)
        for name in {"a", "b", "c"} - ({"b"} if rank == 0 else {"c"} if rank == 2 else set()):
            file.add_shard(name, numbers(6))
        file.write(rank_path(tmp_path, mesh, rank))
    message = refuse(tmp_path, tmp_path / "out", weights_only=True).message
    assert "rank 0 has no b" in message
    assert "rank 2 has no c" in message


@pytest.mark.parametrize("pattern", ["rank_{}.pt", "rank_{}.pth", "model_rank{}.pt"])
def test_rank_files_of_a_script_are_not_taken_for_a_dcp_directory(pattern: str, tmp_path: Path) -> None:
    """SofT-GRPO#2, dinov2#487: accelerate's merge-weights misses `.metadata` in a directory that never had one."""
    source = copy_case("fsdp1_sharded_tensor", tmp_path / "ckpt")
    files = sorted(source.glob("model_world_size_*.pt"))
    for rank, file in enumerate(files):
        file.rename(source / pattern.format(rank))
    report, found = merge(source, tmp_path / "out")
    assert found == truth("fsdp1_sharded_tensor")
    assert "FSDP1 ShardedTensor" in report.checkpoint


@pytest.mark.parametrize("level", [".", "global_step_20", "global_step_20/actor"])
def test_any_level_of_a_run_can_be_given(level: str, tmp_path: Path) -> None:
    """accelerate#2848: merging `checkpoint-2000` fails, it must be the directory below it."""
    run = copy_case("layout_run", tmp_path / "run")
    report, found = merge(run / level, tmp_path / "out")
    assert found == truth("layout_run")
    assert level == "global_step_20/actor" or "global_step_20/actor" in "".join(note.text for note in report.notes)
    (run / "latest_checkpointed_iteration.txt").unlink()
    assert isinstance(refuse(run, tmp_path / "no"), NotACheckpointError)


@pytest.mark.parametrize("place", ["checkpoint-2000", "pytorch_model_fsdp_0/optimizer_0/rank_7/checkpoint-2000"])
def test_ranks_of_accelerate_are_read_whatever_lies_above_them(place: str, tmp_path: Path) -> None:
    """accelerate#4105, accelerate#4119: per-rank `.bin` files had no reader, and names of ancestors mattered."""
    source = copy_case("layout_accelerate_sharded", tmp_path / place)
    assert merge(source, tmp_path / "out")[1] == truth("layout_accelerate_sharded")


def test_flat_parameter_is_unflattened_by_the_config_or_refused(tmp_path: Path) -> None:
    """transformers#34080: an FSDP1 flat parameter, `torch.Size([65667584])`, was saved as it lay in memory."""
    source = copy_case("fsdp1_local", tmp_path / "ckpt")
    assert merge(source, tmp_path / "out")[1] == truth("fsdp1_local")
    edit_json(source / "huggingface" / "config.json", model_type="unheard_of")
    error = refuse(source, tmp_path / "no")
    assert "flat" in error.message
    assert "--shapes-from" in str(error.hint)


def test_flat_tensor_in_a_merged_model_is_found_by_verify(tmp_path: Path) -> None:
    """transformers#34080: the size mismatch was seen only when the model was loaded."""
    numpy_files = pytest.importorskip("safetensors.numpy")
    output = copy_case("fsdp2_w4", tmp_path / "out", "truth")
    tensors = numpy_files.load_file(output / "model.safetensors")
    name = "model.embed_tokens.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].reshape(-1))
    unshard.verify(output)
    numpy_files.save_file(tensors, output / "model.safetensors")
    with pytest.raises(ModelError, match=name):
        unshard.verify(output)


def test_another_roles_and_steps_are_never_mixed_in(tmp_path: Path) -> None:
    """verl#2356: files of an interrupted save lie beside those of another world size."""
    source = write_ranks(tmp_path / "actor", world(2), {"a": numbers(4)})
    for rank in range(3):
        shutil.copyfile(rank_path(source, world(2), 0), rank_path(source, world(4), rank))
    message = refuse(source, tmp_path / "out", weights_only=True).message
    assert "world of 4" in message
    write_json(source / "fsdp_config.json", {"world_size": 2})
    assert "world of 4" in refuse(source, tmp_path / "out", weights_only=True).message
