"""Placement arithmetic against numpy, by its definition, and against torch's own splitting."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unshard.formats.fsdp.placements import Placement, Share, share_of_rank


def chunk_like_torch(array: np.ndarray, count: int, axis: int) -> list[np.ndarray]:
    """`torch.chunk`, padded with empty pieces to `count` of them."""
    size = -(-array.shape[axis] // count)
    bounds = [min(index * size, array.shape[axis]) for index in range(count + 1)]
    return [np.take(array, range(low, high), axis) for low, high in pairwise(bounds)]


def split(array: np.ndarray, placement: Placement, count: int) -> list[np.ndarray]:
    """What a placement over a mesh dimension of `count` makes of an array, by the words of torch's documentation."""
    if placement.dim is None:
        return [array] * count
    if not placement.split:
        return chunk_like_torch(array, count, placement.dim)
    parts = [
        chunk_like_torch(piece, count, placement.dim)
        for piece in chunk_like_torch(array, placement.split, placement.dim)
    ]
    return [np.concatenate([part[index] for part in parts], placement.dim) for index in range(count)]


def expected_local(
    whole: np.ndarray, placements: tuple[Placement, ...], mesh: tuple[int, ...], place: tuple[int, ...], order: Any
) -> np.ndarray:
    for axis in order:
        whole = split(whole, placements[axis], mesh[axis])[place[axis]]
    return whole


def taken(whole: np.ndarray, share: Share) -> np.ndarray:
    """The local array that a share describes."""
    local = np.full(share.shape, -1, whole.dtype)
    for box, here in share.pieces:
        there = tuple(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True))
        local[tuple(slice(a, b) for a, b in zip(here.offsets, here.stops, strict=True))] = whole[there]
    return local


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(prod(shape)).reshape(shape)


def coordinates(mesh: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(product(*map(range, mesh)))


shapes = st.lists(st.integers(0, 13), min_size=1, max_size=3).map(tuple)
meshes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]:
    shape, mesh = draw(shapes), draw(meshes)
    dims = st.one_of(st.none(), st.integers(-len(shape), len(shape) - 1))
    return shape, mesh, tuple(Placement(draw(dims)) for _ in mesh)


@given(laid_out())
def test_shards_are_nested_torch_chunks_from_left_to_right(
    layout: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]],
) -> None:
    shape, mesh, placements = layout
    whole = numbered(shape)
    for place in coordinates(mesh):
        expected = expected_local(whole, placements, mesh, place, range(len(mesh)))
        np.testing.assert_array_equal(taken(whole, share_of_rank(shape, placements, mesh, place)), expected)


@given(laid_out())
def test_the_ranks_of_a_mesh_cover_a_tensor_once_per_replica(
    layout: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]],
) -> None:
    shape, mesh, placements = layout
    seen = np.zeros(shape, int)
    for place in coordinates(mesh):
        for box, _ in share_of_rank(shape, placements, mesh, place).pieces:
            seen[tuple(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True))] += 1
    replicas = prod([size for size, placement in zip(mesh, placements, strict=True) if placement.dim is None])
    assert (seen == replicas).all()


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 5), st.integers(1, 4))
def test_a_strided_shard_over_a_shard_is_cut_from_right_to_left(
    length: int, outer: int, inner: int, columns: int
) -> None:
    """FSDP2 on tensor parallelism: whatever the length, the inner dimension cut first."""
    mesh, placements = (outer, inner), (Placement(0, inner), Placement(0))
    whole = numbered((length, columns))
    plain = (Placement(0), Placement(0))
    for place in coordinates(mesh):
        expected = expected_local(whole, plain, mesh, place, (1, 0))
        np.testing.assert_array_equal(taken(whole, share_of_rank(whole.shape, placements, mesh, place)), expected)


@given(st.integers(0, 40), st.integers(1, 6), st.integers(2, 7))
def test_a_strided_shard_by_itself_takes_a_chunk_of_every_piece(length: int, count: int, pieces: int) -> None:
    whole = numbered((length,))
    for index in range(count):
        share = share_of_rank((length,), (Placement(0, pieces),), (count,), (index,))
        np.testing.assert_array_equal(taken(whole, share), split(whole, Placement(0, pieces), count)[index])


@given(st.data())
def test_any_cutting_order_of_any_mesh(data: st.DataObject) -> None:
    """A shard order, and the same order as torch writes it with _StridedShard, give the same rows."""
    mesh = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=4).map(tuple))
    order = tuple(data.draw(st.permutations(range(len(mesh)))))
    length = data.draw(st.integers(0, 60))
    plain = tuple(Placement(0) for _ in mesh)
    strided = []
    for axis in range(len(mesh)):
        earlier = prod([mesh[other] for other in order[: order.index(axis)] if other > axis])
        strided.append(Placement(0, earlier if earlier > 1 else 0))
    whole = numbered((length,))
    for place in coordinates(mesh):
        expected = expected_local(whole, plain, mesh, place, order)
        by_order = share_of_rank((length,), plain, mesh, place, ((0, order),))
        np.testing.assert_array_equal(taken(whole, by_order), expected)
        by_strides = share_of_rank((length,), tuple(strided), mesh, place)
        np.testing.assert_array_equal(taken(whole, by_strides), expected)


@pytest.mark.torch
@given(st.integers(0, 30), st.integers(1, 6), st.integers(1, 4), st.sampled_from([0, 1, -1, -2]))
@settings(deadline=None)
def test_shard_is_what_torch_splits(length: int, count: int, columns: int, dim: int) -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.tensor.placement_types import Shard

    whole = numbered((length, columns))
    parts, _ = Shard(dim % 2)._split_tensor(torch.from_numpy(whole), count, with_padding=False)
    for index, part in enumerate(parts):
        share = share_of_rank(whole.shape, (Placement(dim),), (count,), (index,))
        np.testing.assert_array_equal(taken(whole, share).ravel(), part.numpy().ravel())


@pytest.mark.torch
@given(st.integers(1, 40), st.integers(1, 5), st.integers(2, 5))
@settings(deadline=None)
def test_strided_shard_is_what_torch_splits(length: int, count: int, pieces: int) -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.tensor.placement_types import _StridedShard

    whole = numbered((length, 2))
    parts, _ = _StridedShard(0, split_factor=pieces)._split_tensor(torch.from_numpy(whole), count, with_padding=False)
    for index, part in enumerate(parts):
        share = share_of_rank(whole.shape, (Placement(0, pieces),), (count,), (index,))
        np.testing.assert_array_equal(taken(whole, share).ravel(), part.numpy().ravel())


@pytest.mark.torch
@given(st.lists(st.integers(1, 4), min_size=2, max_size=4).map(tuple), st.data())
@settings(deadline=None)
def test_cutting_order_is_what_torch_decodes(mesh: tuple[int, ...], data: st.DataObject) -> None:
    """The order read from split factors against torch's own decoding (DTensorSpec)."""
    pytest.importorskip("torch", minversion="2.13")
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    from unshard.formats.fsdp.placements import cutting_order

    class Mesh:
        def size(self, dim: int) -> int:
            return mesh[dim]

    splits = [data.draw(st.sampled_from([1, 2, 3, 4, 6, 8])) for _ in mesh]
    ours = tuple(Placement(0, 0 if factor == 1 else factor) for factor in splits)
    theirs = tuple(Shard(0) if factor == 1 else _StridedShard(0, split_factor=factor) for factor in splits)
    decoded = DTensorSpec._maybe_convert_StridedShard_to_shard_order(theirs, Mesh())
    expected = None if decoded is None else tuple(decoded[0].mesh_dims)
    assert cutting_order(ours, mesh, 0) == expected
