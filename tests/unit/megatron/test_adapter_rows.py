"""Rows of adapters that tensor-parallel ranks saved in their own order come back into that of the matrix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assembled import ROOT, gather, store
from unshard.dtypes import F32
from unshard.errors import UnshardError
from unshard.formats.megatron.distributed.adapter_rows import restore_rows
from unshard.tensors import Tensor, concat

FC1 = "decoder.layers.0.mlp.linear_fc1.adapter"
UP = f"{FC1}.adapter_up.linear_out.weight"
MAGNITUDE = f"{FC1}.weight_magnitude"
IN_PROJ = "decoder.layers.0.self_attention.in_proj.adapter.linear_out.weight"


def pieces(place: Path, name: str, count: int, *shape: int, axis: int = 0) -> Tensor:
    """A tensor that so many pieces of this shape make up, as ranks saved them."""
    stored = store(place, {f"{name}{number}": (F32, shape) for number in range(count)})
    return concat(list(stored.values()), axis, name=name)


def bits(tensor: Tensor, place: Path) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.frombuffer(gather(tensor, {ROOT: place}), np.uint32).reshape(tensor.shape)


def assert_ordered(found: Tensor, stored: Tensor, place: Path, order: Sequence[int], axis: int = 0) -> None:
    """The rows are those that are stored, in this order."""
    assert bits(found, place).tobytes() == np.take(bits(stored, place), order, axis).tobytes()


def restored(*tensors: Tensor) -> tuple[dict[str, Tensor], list[UnshardError]]:
    problems: list[UnshardError] = []
    return dict(restore_rows({tensor.name: tensor for tensor in tensors}, problems)), problems


@pytest.mark.parametrize(
    ("count", "order"),
    [(2, [0, 1, 2, 3]), (4, [0, 1, 4, 5, 2, 3, 6, 7]), (6, [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11])],
)
def test_halves_of_an_adapter_of_ups_alone(count: int, order: list[int], tmp_path: Path) -> None:
    """Two pieces are the halves of one rank."""
    stored = pieces(tmp_path, UP, count, 2, 3)
    found, problems = restored(stored)
    assert not problems
    assert_ordered(found[UP], stored, tmp_path, order)


def test_halves_of_every_expert(tmp_path: Path) -> None:
    stored = pieces(tmp_path, UP.replace("mlp.", "mlp.experts."), 4, 3, 1, 2, axis=1)
    found, problems = restored(stored)
    assert not problems
    assert_ordered(found[stored.name], stored, tmp_path, [0, 2, 1, 3], axis=1)


@pytest.mark.parametrize(("out", "order"), [(4, [0, 1, 4, 5, 2, 3, 6, 7]), (2, [0, 1, 2, 3, 4, 5, 6, 7])])
def test_magnitudes_of_gates_and_ups(out: int, order: list[int], tmp_path: Path) -> None:
    """Whether there are gates is told by B, of which each rank saves gates and ups for themselves."""
    b = pieces(tmp_path, f"{FC1}.linear_out.weight", out, 8 // out, 3)
    stored = pieces(tmp_path / "own", MAGNITUDE, 2, 4)
    found, problems = restored(stored, b)
    assert not problems
    assert_ordered(found[MAGNITUDE], stored, tmp_path / "own", order)


def test_sections_of_a_delta_net(tmp_path: Path) -> None:
    """Two ranks, each with sections of 1, 1, 2, 2, 1 and 1 rows."""
    module = "decoder.layers.0.self_attention."
    base = store(tmp_path, {f"{module}out_proj.weight": (F32, (3, 4)), f"{module}A_log": (F32, (2,))})
    stored = pieces(tmp_path / "own", IN_PROJ, 2, 8, 3)
    found, problems = restored(stored, *base.values())
    assert not problems
    order = [0, 8, 1, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 14, 7, 15]
    assert_ordered(found[IN_PROJ], stored, tmp_path / "own", order)


def test_other_adapters_stay(tmp_path: Path) -> None:
    stored = [pieces(tmp_path, f"{FC1}.{name}.weight", 4, 2, 3) for name in ("linear_out", "adapter_up.linear_in")]
    found, problems = restored(*stored)
    assert not problems
    assert list(found.values()) == stored


def test_sections_that_nothing_tells_are_a_problem(tmp_path: Path) -> None:
    (problem,) = restored(pieces(tmp_path, IN_PROJ, 2, 8, 3))[1]
    assert "2 ranks share its rows" in problem.message
    assert not restored(pieces(tmp_path, IN_PROJ, 1, 16, 3))[1]


@pytest.mark.parametrize("sizes", [(2, 1, 2, 2), (2, 2, 2)])
def test_pieces_that_are_no_shares_of_ranks_are_a_problem(sizes: Sequence[int], tmp_path: Path) -> None:
    stored = store(tmp_path, {f"{number}": (F32, (size, 3)) for number, size in enumerate(sizes)})
    (problem,) = restored(concat(list(stored.values()), 0, name=UP))[1]
    assert UP in problem.message


@pytest.mark.torch
def test_megatron_core_gives_that_order(tmp_path: Path) -> None:
    """`apply_swiglu_sharded_factory`, which Megatron-Bridge calls for every adapter of `linear_fc1`."""
    torch = pytest.importorskip("torch")
    mapping = pytest.importorskip("megatron.core.dist_checkpointing.mapping")
    mlp = pytest.importorskip("megatron.core.transformer.mlp")
    whole = torch.arange(8.0)[:, None].expand(8, 3).contiguous()
    saved = torch.empty_like(whole)
    for rank in range(2):
        own: Any = mapping.ShardedTensor.from_rank_offsets(UP, whole.chunk(2)[rank].contiguous(), (0, rank, 2))
        for part in mlp.apply_swiglu_sharded_factory(own, ()).build():
            start = part.global_offset[0]
            saved[start : start + part.local_shape[0]] = part.data
    stored = pieces(tmp_path, UP, 4, 2, 3)
    file = tmp_path / stored.chunks[0].extent.file.path
    file.write_bytes(saved.numpy().tobytes())
    found, _ = restored(stored)
    assert gather(found[UP], {ROOT: tmp_path}) == whole.numpy().tobytes()
