"""The reader of shards against torch's own HuggingFaceStorageWriter, and what torch puts together from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from assembled import gather
from commands import run
from gloo import run_ranks
from unshard.checkpoint import Checkpoint
from unshard.formats.contract import Source
from unshard.formats.hf_shards import HfShards
from unshard.formats.huggingface.reader import HuggingFace
from unshard.plan.coverage import prove_coverage

torch = pytest.importorskip("torch")
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402

if not hasattr(dcp, "HuggingFaceStorageWriter"):
    pytest.skip("this torch has no HuggingFaceStorageWriter", allow_module_level=True)

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]


def bits(tensor: Any) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def read(directory: Path, truth: Mapping[str, Any]) -> Checkpoint:
    """The catalog, whose tensors are the truth's."""
    shapes = {name: tuple(tensor.shape) for name, tensor in truth.items()}
    found = HfShards().read(Source(directory, named_shapes=lambda _config, _names: shapes))
    assert found.problems == ()
    assert sorted(found.tensors) == sorted(truth)
    for name, tensor in found.tensors.items():
        assert prove_coverage(tensor) == []
        assert tensor.shape == tuple(truth[name].shape)
        assert tensor.dtype.torch_name == str(truth[name].dtype).removeprefix("torch.")
        assert gather(tensor, found.roots) == bits(truth[name]), name
    return found


def every_type() -> dict[str, Any]:
    types = (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
    )  # fmt: skip
    tensors = {f"m.{str(dtype)[6:]}.weight": (torch.arange(30) % 2).reshape(6, 5).to(dtype) for dtype in types}
    return tensors | {"m.scalar": torch.tensor(2.5), "m.step": torch.tensor(7), "m.none.weight": torch.zeros(0, 3)}


@pytest.mark.parametrize("files", [1, 3, 15])
def test_what_one_process_saves(tmp_path: Path, files: int) -> None:
    state = every_type()
    index = {name: number % files + 1 for number, name in enumerate(state)}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), index, save_distributed=True)
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert len(list(tmp_path.glob("shard-*"))) == files
    read(tmp_path, state)


def test_whole_tensors_are_a_plain_model(tmp_path: Path) -> None:
    """`save_distributed=False`: the index says that all tensors together have no bytes."""
    state = {f"m.{name}.weight": torch.randn(4, 5) for name in "abc"}
    index = {name: number + 1 for number, name in enumerate(state)}
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path), index), no_dist=True)
    found = HuggingFace().read(Source(tmp_path))
    assert found.problems == ()
    assert {name: gather(tensor, found.roots) for name, tensor in found.tensors.items()} == {
        name: bits(tensor) for name, tensor in state.items()
    }
    assert any("does not record where tensors end" in note.text for note in found.notes)
    shapes = dict.fromkeys(state, (4, 5))
    known = HuggingFace().read(Source(tmp_path, named_shapes=lambda _config, _names: shapes))
    assert not any("does not record where tensors end" in note.text for note in known.notes)


def test_what_several_ranks_save(tmp_path: Path) -> None:
    """Rows and columns cut evenly and unevenly on two axes, replicas, ranks that hold nothing, plain tensors."""
    whole = {name: torch.arange(count * 6.0).reshape(count, 6) for name, count in (("even", 8), ("odd", 5), ("few", 1))}
    whole["deep"] = torch.arange(5 * 3 * 7).reshape(5, 3, 7)
    whole["fp8"] = torch.randn(7, 4).to(torch.float8_e4m3fn)
    layouts = {"r": (Shard(0), Replicate()), "rc": (Shard(0), Shard(1)), "c": (Shard(1), Replicate())}
    layouts |= {"hsdp": (Replicate(), Shard(0))}
    truth = {f"{name}.{key}.weight": tensor for name, tensor in whole.items() for key in layouts if name != "fp8"}
    truth |= {"fp8.r.weight": whole["fp8"], "plain.weight": torch.ones(3), "scalar": torch.tensor(3)}

    def save(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        state = dict(truth)
        for name, tensor in truth.items():
            layout = layouts.get(name.split(".")[-2]) if "." in name else None
            if layout is not None:
                step = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
                part = distribute_tensor(step.clone(), mesh, layout)
                local = part.to_local().view(tensor.dtype)
                state[name] = DTensor.from_local(
                    local, mesh, layout, run_check=False, shape=tensor.shape, stride=tensor.stride()
                )
        index = {name: number % 2 + 1 for number, name in enumerate(truth)}
        writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "ckpt"), index, save_distributed=True)
        dcp.save(state, storage_writer=writer)

    run_ranks(4, save, tmp_path)
    found = read(tmp_path / "ckpt", truth)
    assert found.world_size == 4
    assert {chunk.rank for tensor in found.tensors.values() for chunk in tensor.chunks} == {0, 1, 2, 3}


def piece(tensor: Any, parts: int, index: int) -> Any:
    chunks = torch.chunk(tensor, parts, dim=0)
    return (chunks[index] if index < len(chunks) else tensor[:0]).clone()


def test_uneven_pieces_of_fsdp_above_tensor_parallelism(tmp_path: Path) -> None:
    """PyTorch 2.13 records wrong places for 7 rows on 3 x 2 ranks, and refuses to save 13."""
    whole = {f"w{rows}.weight": torch.randn(rows, 3) for rows in (7, 12)}

    def save(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("fsdp", "tp"))
        layout = (_StridedShard(0, split_factor=2), Shard(0))
        state = {}
        for name, tensor in whole.items():
            local = piece(piece(tensor, 2, rank % 2), 3, rank // 2)
            state[name] = DTensor.from_local(
                local, mesh, layout, run_check=False, shape=tensor.shape, stride=tensor.stride()
            )
        dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path / "ckpt"), save_distributed=True))

    run_ranks(6, save, tmp_path)
    found = read(tmp_path / "ckpt", whole)
    assert "w7.weight" in found.notes[0].tensors
    unknown = HfShards().read(Source(tmp_path / "ckpt"))
    assert unknown.problems == ()
    assert {name: tensor.shape for name, tensor in unknown.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in whole.items()
    }


@pytest.fixture
def consolidated(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A model that torch put together from its shards, which are still there."""
    state = {f"m.{name}.weight": torch.randn(4, 5) for name in "abc"}
    index = {name: number + 1 for number, name in enumerate(state)}
    writer = dcp.HuggingFaceStorageWriter(
        str(tmp_path / "out"), index, save_distributed=True, enable_consolidation=True
    )
    dcp.save(state, storage_writer=writer, no_dist=True)
    return tmp_path / "out", state


def test_a_consolidated_model_is_read_as_it_is(consolidated: tuple[Path, dict[str, Any]]) -> None:
    place, state = consolidated
    for found in (HuggingFace().read(Source(place)), HfShards().read(Source(place / "sharded"))):
        assert found.problems == ()
        assert {name: gather(tensor, found.roots) for name, tensor in found.tensors.items()} == {
            name: bits(tensor) for name, tensor in state.items()
        }
    notes = [note.text for note in HuggingFace().read(Source(place)).notes]
    assert f"the shards that this model was put together from lie in `{place / 'sharded'}`, and were not read" in notes


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_consolidated_model_points_to_its_shards(
    consolidated: tuple[Path, dict[str, Any]], damage: str
) -> None:
    """NeMo-RL#3624: a consolidation that ran out of time leaves truncated files where the model should be."""
    place, _ = consolidated
    victim = place / "model-00002-of-00003.safetensors"
    if damage == "missing":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:-4])
    merged = run("merge", place, place.parent / "merged", "--weights-only")
    assert merged.code in (4, 5)
    assert victim.name in merged.stderr
    assert f"unshard merge {place / 'sharded'}" in merged.stderr
    assert run("merge", place / "sharded", place.parent / "merged", "--weights-only").code == 0


def test_an_interrupted_consolidation_is_read_from_the_shards(consolidated: tuple[Path, dict[str, Any]]) -> None:
    """torchtitan#2137, torch PR#171885: shards were written, and neither index nor model."""
    place, state = consolidated
    for path in place.glob("model*"):
        path.unlink()
    assert not list(place.glob("*.json"))
    merged = run("merge", place, place.parent / "merged", "--weights-only")
    assert merged.code == 0
    found = HuggingFace().read(Source(place.parent / "merged"))
    assert {name: gather(tensor, found.roots) for name, tensor in found.tensors.items()} == {
        name: bits(tensor) for name, tensor in state.items()
    }
