"""Any sharding of any tensors is read as it was, and without any one of its pieces it is an error."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assembled import gather
from hf_shard_bytes import Array, Part, write_shard
from unshard.checkpoint import Checkpoint
from unshard.errors import UnshardError
from unshard.formats.contract import Source
from unshard.formats.hf_shards import HfShards
from unshard.plan.coverage import prove_coverage

Pieces = list[tuple[str, int, Part]]
"""Tensor, rank, and the piece of it."""


def cut(array: Array, offsets: tuple[int, ...], draw: Any) -> Iterator[Part]:
    """Cut along random axes at random places, until it is enough."""
    axes = [axis for axis, size in enumerate(array.shape) if size > 1]
    if not axes or draw(st.integers(0, 2)) == 0:
        yield offsets, array
        return
    axis = draw(st.sampled_from(axes))
    place = draw(st.integers(1, array.shape[axis] - 1))
    for start, part in zip((0, place), np.split(array, [place], axis), strict=True):
        moved = (*offsets[:axis], offsets[axis] + start, *offsets[axis + 1 :])
        yield from cut(part, moved, draw)


@st.composite
def checkpoints(draw: Any) -> tuple[dict[str, Array], Pieces]:
    """Whole tensors and their pieces, no two of a tensor on one rank; the ranks are 0 to N without gaps."""
    whole: dict[str, Array] = {}
    pieces: Pieces = []
    for name in ("a.weight", "b.weight", "c.bias")[: draw(st.integers(1, 3))]:
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
        whole[name] = np.arange(math.prod(shape), dtype=np.float32).reshape(shape) + len(whole) * 1000
        parts = list(cut(whole[name], (0,) * len(shape), draw))
        ranks = draw(st.permutations(range(len(parts))))
        pieces += [(name, rank, part) for rank, part in zip(ranks, parts, strict=True)]
    return whole, pieces


def read(directory: Path, whole: dict[str, Array], pieces: Pieces) -> Checkpoint:
    for rank in sorted({rank for _, rank, _ in pieces}):
        write_shard(directory, rank + 1, {name: part for name, holder, part in pieces if holder == rank})
    shapes = {name: array.shape for name, array in whole.items()}
    return HfShards().read(Source(directory, named_shapes=lambda _config, _names: shapes))


@given(checkpoints())
@settings(max_examples=60)
def test_every_sharding_is_read(checkpoint: tuple[dict[str, Array], Pieces]) -> None:
    whole, pieces = checkpoint
    with tempfile.TemporaryDirectory() as place:
        found = read(Path(place), whole, pieces)
        assert found.problems == ()
        assert found.notes == ()
        for name, array in whole.items():
            assert prove_coverage(found.tensors[name]) == []
            assert gather(found.tensors[name], found.roots) == array.tobytes()


@given(checkpoints(), st.data())
@settings(max_examples=100)
def test_every_missing_piece_is_an_error_or_a_parameter_that_is_told(
    checkpoint: tuple[dict[str, Array], Pieces], data: st.DataObject
) -> None:
    whole, pieces = checkpoint
    missing = data.draw(st.sampled_from(pieces))
    rest = [piece for piece in pieces if piece is not missing]
    if not rest:
        return
    with tempfile.TemporaryDirectory() as place:
        found = read(Path(place), whole, rest)
        if any(name == missing[0] for name, _, _ in rest):
            assert any(missing[0] in str(problem) for problem in found.problems)
        else:
            assert any(missing[0] in note.tensors for note in found.notes)
            assert missing[0] not in found.tensors


@pytest.mark.parametrize("known", [True, False])
@given(checkpoint=checkpoints())
@settings(max_examples=40)
def test_a_missing_shard_is_never_silent(checkpoint: tuple[dict[str, Array], Pieces], known: bool) -> None:
    """The last shard: where nothing tells the shapes, that is at least said."""
    whole, pieces = checkpoint
    last = max(rank for _, rank, _ in pieces)
    rest = [piece for piece in pieces if piece[1] != last]
    if not rest:
        return
    with tempfile.TemporaryDirectory() as place:
        found = read(Path(place), whole if known else {}, rest)
        said = [note for note in found.notes if note.level == "warning"]
        assert found.problems or said
        if known:
            lost = {name for name, rank, _ in pieces if rank == last}
            told = {name for note in said for name in note.tensors}
            text = "\n".join(str(problem) for problem in found.problems)
            assert all(name in text or name in told for name in lost)


@given(checkpoints(), st.data())
@settings(max_examples=150)
def test_damaged_bytes_are_an_error_or_change_nothing_else(
    checkpoint: tuple[dict[str, Array], Pieces], data: st.DataObject
) -> None:
    """Whatever stands in a header, nothing but an UnshardError comes of it, and no chunk that leads out of its file."""
    whole, pieces = checkpoint
    with tempfile.TemporaryDirectory() as place:
        read(Path(place), whole, pieces)
        victim = data.draw(st.sampled_from(sorted(Path(place).iterdir())))
        content = bytearray(victim.read_bytes())
        header = 8 + int.from_bytes(content[:8], "little")
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, header - 1))] = data.draw(st.sampled_from(b'0123456789[]{}",:-e \\x'))
        victim.write_bytes(content)
        shapes = {name: array.shape for name, array in whole.items()}
        try:
            found = HfShards().read(Source(Path(place), named_shapes=lambda _config, _names: shapes))
        except UnshardError:
            return
        for tensor in found.tensors.values():
            for chunk in tensor.chunks:
                end = chunk.extent.offset + chunk.extent.span(chunk.box.sizes)
                assert header <= chunk.extent.offset or chunk.extent.file.path != victim.name
                assert end <= (Path(place) / chunk.extent.file.path).stat().st_size
