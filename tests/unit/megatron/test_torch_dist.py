"""The torch_dist backend, from directories that torch's own writer made."""

from __future__ import annotations

import json
import pickle
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from format_contract import check_format
from unshard.errors import FormatError, IncompleteError, UnshardError
from unshard.formats.contract import Source
from unshard.formats.megatron.distributed import MegatronDist, MegatronFsdp

torch = pytest.importorskip("torch")

from megatron import random_full  # noqa: E402
from megatron.catalog import assert_holds  # noqa: E402
from megatron.chunks import Piece, save_pieces  # noqa: E402
from megatron.naming import te_name  # noqa: E402
from megatron.writer import write_torch_dist  # noqa: E402

pytestmark = pytest.mark.torch

State = dict[str, torch.Tensor]


def named(full: State) -> State:
    return {te_name(name, full): tensor for name, tensor in full.items()}


def hybrid() -> State:
    """Latent attention, a gated delta net, experts, adapters and a layer of multi-token prediction."""
    draw = random_full.Draw(dtype=torch.bfloat16)
    full = random_full.model(2, experts=(1,), bias=False, draw=draw)
    full |= random_full.latent_attention(draw, "decoder.layers.2.")
    full |= random_full.delta_net(draw, "decoder.layers.3.")
    full |= random_full.adapters(draw, "decoder.layers.0.")
    full |= {f"mtp.layers.0.{norm}.weight": draw(24) for norm in ("enorm", "hnorm", "final_layernorm")}
    inner = "mtp.layers.0.transformer_layer."
    full |= {"mtp.layers.0.eh_proj.weight": draw(24, 48), f"{inner}pre_mlp_layernorm.weight": draw(24)}
    return full | random_full.attention(draw, inner) | random_full.mixture(draw, f"{inner}mlp.")


@pytest.mark.parametrize(
    ("full", "layout"),
    [
        (random_full.model(4), {"tp": 2, "pp": 2, "optimizer": True}),
        (random_full.model(2, bias=True, tied=True), {"tp": 4, "common": "item"}),
        (random_full.model(3, experts=(0, 1, 2)), {"tp": 4, "etp": 2, "pp": 3, "prefix": "module."}),
        (random_full.model(3, experts=(1,)), {"tp": 2, "homogeneous": False}),
        (random_full.model(2, experts=(1,)), {"tp": 2, "singleton": True}),
        (hybrid(), {"tp": 2, "homogeneous": False, "args": {"vocab_size": 90}}),
        (hybrid(), {"tp": 4, "singleton": True, "prefix": "module."}),
    ],
    ids=["homogeneous", "item", "experts", "per-layer", "singleton", "hybrid", "hybrid-singleton"],
)
def test_every_value(tmp_path: Path, full: State, layout: dict[str, Any]) -> None:
    place = write_torch_dist(tmp_path, full, **layout)
    assert MegatronDist().detect(place) == "a Megatron-Core distributed checkpoint (torch_dist)"
    assert MegatronFsdp().detect(place) is None
    checkpoint = MegatronDist().read(Source(place))
    assert_holds(checkpoint, named(full))
    assert "iteration 10" in checkpoint.title
    assert ("optimizer" in checkpoint.skipped) == layout.get("optimizer", False)


def test_arguments_come_from_the_common_item_too(tmp_path: Path) -> None:
    args = {"num_query_groups": 4, "group_query_attention": True, "num_attention_heads": 8}
    for common in ("file", "item"):
        place = write_torch_dist(tmp_path / common, random_full.model(2), tp=2, args=args, common=common)
        checkpoint = MegatronDist().read(Source(place))
        assert checkpoint.facts.items() >= args.items()
        assert checkpoint.mesh == (("tp", 2),)
        assert checkpoint.skipped.keys() == {"*._extra_state"}


def test_files_on_the_disks_of_several_nodes(tmp_path: Path) -> None:
    full = random_full.model(2)
    place = write_torch_dist(tmp_path / "here", full, tp=2, pp=2)
    other = tmp_path / "there"
    other.mkdir()
    for rank in (2, 3):
        shutil.move(place / f"__{rank}_0.distcp", other)
    assert MegatronDist().read(Source(place)).problems
    assert_holds(MegatronDist().read(Source(place, (other,))), named(full))


def test_contract(tmp_path: Path) -> None:
    place = write_torch_dist(tmp_path, random_full.model(2), tp=2, pp=2)
    (tmp_path / "scratch").mkdir()
    check_format(MegatronDist(), place, tmp_path / "scratch")


# Flattened tensors ----------------------------------------------------------------------------------------------------


def write_flattened(place: Path, full: State, grids: dict[str, tuple[int, ...]], *, recorded: bool = True) -> None:
    """Each tensor cut into a grid of shards, each shard flat, and cut into three ranges at uneven places."""
    pieces = []
    for key, tensor in full.items():
        grid = grids[key]
        shard = [size // count for size, count in zip(tensor.shape, grid, strict=True)]
        flat = torch.Size(shard).numel()
        for index in torch.cartesian_prod(*[torch.arange(count) for count in grid]).reshape(-1, len(grid)).tolist():
            box = [slice(i * size, (i + 1) * size) for i, size in zip(index, shard, strict=True)]
            values = tensor[tuple(box)].reshape(-1)
            bounds = [0, flat // 3, flat // 3 + 5, flat]
            for rank, (start, stop) in enumerate(pairwise(bounds)):
                data = values[start:stop].reshape(*[1] * len(grid), -1)
                pieces.append(Piece(key, (*grid, flat), (*index, start), data, rank))
    place.mkdir()
    save_pieces(place, pieces, {})
    (place / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    metadata = pickle.loads((place / ".metadata").read_bytes())
    shapes = {key: {"nd_reformulated_orig_global_shape": tuple(tensor.shape)} for key, tensor in full.items()}
    metadata.mcore_data = shapes if recorded else {}
    (place / ".metadata").write_bytes(pickle.dumps(metadata))


def test_flattened_weights_get_their_shape_back(tmp_path: Path) -> None:
    """What fails in the framework as "Cannot find global shape metadata for N-D flattened tensor"."""
    full = {
        "decoder.layers.self_attention.linear_proj.weight": torch.randn(2, 6, 10),
        "decoder.layers.self_attention.linear_qkv.weight": torch.randn(2, 12, 7),
        "decoder.final_layernorm.weight": torch.randn(21),
    }
    write_flattened(tmp_path / "saved", full, dict(zip(full, [(2, 1, 2), (2, 3, 1), (1,)], strict=True)))
    checkpoint = MegatronDist().read(Source(tmp_path / "saved"))
    stacks = [(key.partition("layers."), tensor) for key, tensor in full.items()]
    expected = {
        f"{block}{dot}{number}.{rest}": layer
        for (block, dot, rest), tensor in stacks
        if dot
        for number, layer in enumerate(tensor)
    }
    final = "decoder.final_layernorm.weight"
    assert_holds(checkpoint, expected | {final: full[final]})


@pytest.mark.parametrize("shape", [(2, 6), (2, 6, 11), (3, 4, 10), (2, True, 60), "abc", (0, 6, 10)])
def test_a_recorded_shape_that_cannot_be(tmp_path: Path, shape: Any) -> None:
    key = "decoder.layers.self_attention.linear_proj.weight"
    write_flattened(tmp_path / "saved", {key: torch.randn(2, 6, 10)}, {key: (2, 1, 2)})
    metadata = pickle.loads((tmp_path / "saved" / ".metadata").read_bytes())
    metadata.mcore_data = {key: {"nd_reformulated_orig_global_shape": shape}}
    (tmp_path / "saved" / ".metadata").write_bytes(pickle.dumps(metadata))
    problems = MegatronDist().read(Source(tmp_path / "saved")).problems
    assert [f"`{key}`: a flattened tensor of [2, 1, 2, 30] cannot" in str(problem) for problem in problems] == [True]


# What can be wrong ----------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return write_torch_dist(tmp_path, random_full.model(4), tp=2, pp=2, args={"vocab_size": 96})


def problems_of(place: Path) -> str:
    try:
        found = MegatronDist().read(Source(place)).problems
    except UnshardError as error:
        found = (error,)
    assert found
    return "\n".join(str(problem) for problem in found)


@pytest.mark.parametrize("common", ["file", "item"])
def test_an_unfinished_save(tmp_path: Path, common: Any) -> None:
    place = write_torch_dist(tmp_path, random_full.model(2), common=common)
    (place / "metadata.json").unlink()
    assert MegatronDist().detect(place) == "an unfinished Megatron-Core distributed checkpoint (torch_dist)"
    assert MegatronFsdp().detect(place) is None
    assert "metadata.json is missing, which Megatron writes last" in problems_of(place)


def test_a_save_that_was_interrupted(place: Path) -> None:
    (place / "metadata.json").unlink()
    (place / ".metadata").rename(place / ".metadata.tmp")
    assert MegatronDist().detect(place) == "an unfinished Megatron-Core distributed checkpoint (torch_dist)"
    assert ".metadata.tmp" in problems_of(place)
    assert "interrupted" in problems_of(place)


def test_a_copy_without_hidden_files(place: Path) -> None:
    (place / ".metadata").unlink()
    assert MegatronDist().detect(place)
    assert "no .metadata" in problems_of(place)


def test_damaged_metadata(place: Path) -> None:
    data = (place / ".metadata").read_bytes()
    for damaged in (data[: len(data) // 2], b"", data.replace(b"TensorStorageMetadata", b"TensorStorageMetadatX")):
        (place / ".metadata").write_bytes(damaged)
        with pytest.raises(FormatError, match=r"\.metadata"):
            MegatronDist().read(Source(place))


def test_a_missing_data_file_is_named(place: Path) -> None:
    (place / "__1_0.distcp").unlink()
    assert "__1_0.distcp" in problems_of(place)


def test_damaged_common_state_is_not_taken_for_an_absent_one(place: Path) -> None:
    (place / "common.pt").write_bytes((place / "common.pt").read_bytes()[:100])
    assert "common.pt" in problems_of(place)
    torch.save([1, 2], place / "common.pt")
    assert "common.pt: holds a list, where Megatron keeps a dict" in problems_of(place)


def test_a_damaged_seal(place: Path) -> None:
    (place / "metadata.json").write_text('{"sharded_backend": ')
    assert MegatronDist().detect(place) == "an unfinished Megatron-Core distributed checkpoint (torch_dist)"
    assert "metadata.json" in problems_of(place)


def test_another_backend(place: Path) -> None:
    (place / "metadata.json").write_text(json.dumps({"sharded_backend": "tensorstore"}))
    assert "`sharded_backend` is 'tensorstore'" in problems_of(place)


def test_two_iterations(place: Path) -> None:
    shutil.move(place, place.with_name("iter_0000020"))
    error = problems_of(place.with_name("iter_0000020"))
    assert "named after iteration 20, but holds what was recorded at iteration 10" in error
    assert "iter_0000010" in error


def test_layers_that_training_did_not_record(tmp_path: Path) -> None:
    place = write_torch_dist(tmp_path, random_full.model(4), args={"num_layers": 6})
    assert "training recorded 6 layers, but layers 0-3 are stored" in problems_of(place)


def test_a_checkpoint_of_other_states(tmp_path: Path) -> None:
    place = tmp_path / "extra"
    place.mkdir()
    save_pieces(place, [Piece("optimizer.state.exp_avg.x", (2,), (0,), torch.ones(2), 0)], {})
    (place / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    with pytest.raises(IncompleteError, match="no tensor of a model is stored here"):
        raise MegatronDist().read(Source(place)).problems[0]
