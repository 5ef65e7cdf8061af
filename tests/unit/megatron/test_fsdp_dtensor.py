"""Megatron-FSDP's checkpoints, from directories that torch's own writer made."""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

import pytest

from format_contract import check_format
from unshard.checkpoint import Checkpoint
from unshard.formats.contract import Source
from unshard.formats.megatron.distributed import MegatronDist, MegatronFsdp

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

from megatron import random_full  # noqa: E402
from megatron.catalog import assert_holds  # noqa: E402
from megatron.chunks import Piece, save_pieces  # noqa: E402
from megatron.naming import EXPERT, te_name  # noqa: E402

pytestmark = pytest.mark.torch

State = dict[str, torch.Tensor]
WRAPPERS = ["", "module.", "module.module."]


def model() -> State:
    return random_full.model(3, experts=(1, 2), draw=random_full.Draw(dtype=torch.bfloat16))


def named(full: State) -> State:
    return {te_name(name, full): tensor for name, tensor in full.items()}


def keys_of(full: State, *, grouped: bool) -> State:
    """The model's entries in the state dict: gate and up by themselves, experts as TEGroupedMLP numbers them."""
    entries = {}
    for name, tensor in named(full).items():
        expert = EXPERT.fullmatch(name)
        key = f"{expert[1]}.{expert[3]}.{expert[4]}{expert[2]}" if expert and grouped else name
        if "linear_fc1" in name and "layer_norm" not in name:
            gate, up = tensor.chunk(2)
            entries |= {f"{key}_w": gate, f"{key}_v": up}
        else:
            entries[key] = tensor
    return entries


def read(place: Path) -> Checkpoint:
    assert MegatronFsdp().detect(place) == "a Megatron-FSDP checkpoint (fsdp_dtensor)"
    assert MegatronDist().detect(place) is None
    return MegatronFsdp().read(Source(place))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("grouped", [True, False])
def test_a_state_dict_saved_by_torch(tmp_path: Path, wrapper: str, grouped: bool) -> None:
    full = model()
    entries = {f"{wrapper}{key}": tensor for key, tensor in keys_of(full, grouped=grouped).items()}
    state = {
        "args": argparse.Namespace(num_layers=3, hidden_size=24, tensor_model_parallel_size=2, iteration=7),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "optimizer": {
            "state": {key: {"exp_avg": tensor.float()} for key, tensor in entries.items()},
            "param_groups": [{"lr": 0.1}],
        },
        "opt_param_scheduler": {"max_lr": 0.1, "num_steps": 7},
        "rng_state": {"(0, 0)": [{"torch_rng_state": torch.arange(4)}]},
        "model": entries,
    }
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    checkpoint = read(tmp_path / "saved")
    assert_holds(checkpoint, named(full))
    assert checkpoint.title == "Megatron-FSDP fsdp_dtensor, iteration 7, mesh (tp=2)"
    assert checkpoint.facts["hidden_size"] == 24
    assert checkpoint.skipped.keys() == {"optimizer", "opt_param_scheduler", "rng_state", "checkpoint_version"}


def write_uneven(place: Path, full: State) -> None:
    """Rows of each parameter on three ranks, so many that some ranks have none."""
    pieces = []
    for key, tensor in keys_of(full, grouped=True).items():
        bounds = [0, (len(tensor) + 1) // 3, len(tensor) - 1, len(tensor)]
        for rank, (start, stop) in enumerate(pairwise(bounds)):
            offset = (start, *[0] * (tensor.ndim - 1))
            pieces.append(Piece(f"model.module.{key}", tuple(tensor.shape), offset, tensor[start:stop], rank))
    place.mkdir()
    save_pieces(place, [piece for piece in pieces if len(piece.data)], {}, files_per_rank=2)


def test_uneven_shards(tmp_path: Path) -> None:
    full = model()
    write_uneven(tmp_path / "saved", full)
    assert_holds(read(tmp_path / "saved"), named(full))


def test_contract(tmp_path: Path) -> None:
    write_uneven(tmp_path / "saved", model())
    (tmp_path / "scratch").mkdir()
    check_format(MegatronFsdp(), tmp_path / "saved", tmp_path / "scratch")


@pytest.mark.parametrize(
    "key",
    [
        "model.model.layers.0.self_attn.q_proj.weight",
        "model.decoder.layers.0.self_attn.k_proj.weight",
        "model.model.visual.blocks.0.mlp.linear_fc1.weight",
        "model.transformer.embedding.word_embeddings.weight",
        "optimizer.decoder.layers.0.mlp.linear_fc1.weight",
        "optimizer.state.model.decoder.layers.0.mlp.linear_fc1.weight.exp_avg",
        "layers.0.attention.wq.weight",
    ],
)
def test_other_directories_of_torch_are_not_taken_for_megatrons(tmp_path: Path, key: str) -> None:
    root, _, rest = key.partition(".")
    dcp.save({root: {rest: torch.ones(2)}}, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert MegatronFsdp().detect(tmp_path / "saved") is None
    assert MegatronDist().detect(tmp_path / "saved") is None


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    full = model()
    entries = {
        f"model.{key}": tensor
        for key, tensor in keys_of(full, grouped=True).items()
        if not key.startswith("decoder.layers.1.mlp.experts.linear_fc2.weight5")
    }
    dcp.save(entries, checkpoint_id=tmp_path / "saved", no_dist=True)
    problems = read(tmp_path / "saved").problems
    assert ["expert 5 missing: `decoder.layers.1.mlp.experts.linear_fc2.weight`" in str(p) for p in problems] == [True]
