"""Models in DCP directories that PyTorch itself saves: whatever lies beside them, and however they are sharded."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from assembled import gather
from unshard.checkpoint import Checkpoint
from unshard.formats.contract import Source
from unshard.formats.dcp import Dcp
from unshard.plan.coverage import prove_coverage

torch = pytest.importorskip("torch")
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # noqa: E402
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan  # noqa: E402
from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

WORLD = 4

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "ASGD": {}, "Adadelta": {}, "Adafactor": {}, "Adagrad": {}, "Adam": {"amsgrad": True}, "AdamW": {}, "Adamax": {},
    "NAdam": {}, "RAdam": {}, "RMSprop": {"momentum": 0.9, "centered": True}, "Rprop": {}, "SGD": {"momentum": 0.9},
}  # fmt: skip


class Net(torch.nn.Module):
    """A model with what models have: matrices, tied ones, a scalar, buffers, some of them integers, and nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 5)
        self.body = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 5))
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, tokens: Any) -> Any:
        return self.head(self.body(self.embed(tokens)) * self.scale)


def trained(optimizer: str) -> tuple[Net, Any]:
    """A model after one step."""
    torch.manual_seed(0)
    model = Net()
    optim = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01, **OPTIMIZERS[optimizer])
    model(torch.arange(6)).sum().backward()
    optim.step()
    return model, optim


def read(directory: Path) -> Checkpoint:
    checkpoint = Dcp().read(Source(directory))
    assert checkpoint.problems == ()
    return checkpoint


def assert_same(directory: Path, checkpoint: Checkpoint, truth: dict[str, Any]) -> None:
    assert checkpoint.tensors.keys() == truth.keys()
    for name, tensor in checkpoint.tensors.items():
        assert prove_coverage(tensor) == []
        assert tensor.shape == tuple(truth[name].shape)
        flat = truth[name].detach().contiguous().reshape(-1)
        expected = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        assert gather(tensor, {"source": directory}) == expected, name


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_states_of_every_optimizer_are_told_by_what_they_keep(optimizer: str, flat: bool, tmp_path: Path) -> None:
    model, optim = trained(optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    kept = get_optimizer_state_dict(model, optim, options=options)
    truth = get_model_state_dict(model)
    dcp.save({"net": truth, "o": kept, "epoch": 3}, checkpoint_id=tmp_path, no_dist=True)
    checkpoint = read(tmp_path)
    assert_same(tmp_path, checkpoint, truth)
    assert "the model lies under `net` in the training state" in checkpoint.notes[0].text
    assert [note.level for note in checkpoint.notes] == ["note", "note"]
    assert checkpoint.notes[1].text.startswith("optimizer states: ")


def test_a_training_state_of_many_parts(tmp_path: Path) -> None:
    model, optim = trained("AdamW")
    truth = get_model_state_dict(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 1)
    state = {
        **truth,
        "optimizer": get_optimizer_state_dict(
            model, optim, options=StateDictOptions(flatten_optimizer_state_dict=True)
        ),
        "lr_scheduler": scheduler.state_dict(),
        "dataloader": {"dp_rank_0": b"\x80\x04N."},
        "train_state": {"step": torch.tensor(3), "losses": [torch.ones(2), {"a": 1}]},
        "rng": {"cpu": torch.get_rng_state()},
    }
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    checkpoint = read(tmp_path)
    assert_same(tmp_path, checkpoint, truth)
    assert any(note.text.startswith("other states: 3 tensors") for note in checkpoint.notes)
    assert {"lr_scheduler", "dataloader", "optimizer"} <= checkpoint.skipped.keys()


def test_a_planner_that_flattens_nothing(tmp_path: Path) -> None:
    """Without `flatten_state_dict` no paths are recorded."""
    truth = get_model_state_dict(trained("SGD")[0])
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({f"model.model.{name}": value for name, value in truth.items()}, checkpoint_id=tmp_path, planner=planner,
             no_dist=True)  # fmt: skip
    checkpoint = read(tmp_path)
    assert_same(tmp_path, checkpoint, {f"model.{name}": value for name, value in truth.items()})
    assert "is not recorded" in checkpoint.notes[0].text


@pytest.mark.parametrize(("replicate", "copies"), [(1, False), (2, False), (2, True)])
def test_meshes_and_replicas(replicate: int, copies: bool, tmp_path: Path) -> None:
    """FSDP2, and HSDP with and without the copies that planners leave out: all ranks, one after the other."""
    truth = {
        "a.weight": torch.arange(35.0).reshape(7, 5),
        "b.weight": torch.arange(6).reshape(2, 3),
        "c": torch.ones(3),
    }
    planner, plans, states, paths = dcp.DefaultSavePlanner(), [], [], {}
    for rank in range(WORLD):
        with as_rank(rank):
            state = {"model": {**sharded(truth, replicate), **({"c": truth["c"]} if rank == 0 else {})}}
            planner.set_up_planner(state, is_coordinator=rank == 0)
            plans.append(planner.create_local_plan())
            states.append(flatten_state_dict(state)[0])
            paths |= planner.mappings
    planned = create_default_global_save_plan(plans) if copies else planner.create_global_plan(plans)
    plans, metadata = planned
    places = [place for rank in range(WORLD) for place in write(tmp_path, rank, plans[rank], states[rank])]
    metadata = replace(metadata, storage_data=dict(places), planner_data=paths)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    checkpoint = read(tmp_path)
    assert_same(tmp_path, checkpoint, truth)
    assert len(checkpoint.tensors["a.weight"].chunks) == WORLD // replicate


@contextmanager
def as_rank(rank: int) -> Iterator[None]:
    """One rank of a process group that sends nothing."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def sharded(truth: dict[str, Any], replicate: int) -> dict[str, Any]:
    """The state dict of the current rank on a mesh (replicate, shard), without the plain tensor `c`."""
    shards = WORLD // replicate
    mesh = init_device_mesh("cpu", (replicate, shards))
    state: dict[str, Any] = {}
    for name in ("a.weight", "b.weight"):
        pieces, at = truth[name].chunk(shards), mesh.get_local_rank(1)
        local = pieces[at] if at < len(pieces) else truth[name][:0]
        shape, stride = truth[name].shape, truth[name].stride()
        state[name] = DTensor.from_local(
            local, mesh, (Replicate(), Shard(0)), run_check=False, shape=shape, stride=stride
        )
    return state


def write(directory: Path, rank: int, plan: Any, state: dict[str, Any]) -> list[tuple[Any, Any]]:
    """What the file system writer does with a rank's plan; the places of its items."""
    file, places = directory / f"__{rank}_0.distcp", []
    with file.open("wb") as stream:
        for item in plan.items:
            value, start = state[item.index.fqn], stream.tell()
            torch.save((value.to_local() if isinstance(value, DTensor) else value).clone(), stream)
            places.append((item.index, _StorageInfo(file.name, start, stream.tell() - start)))
    return places
