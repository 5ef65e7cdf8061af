"""The boxes in which verification reads: each element once, and few reads whatever the order of the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unshard.dtypes import F32
from unshard.settings import Settings
from unshard.tensors import Box, Chunk, SourceFile, Tensor, contiguous_chunk, row_major_strides
from unshard.verify.boxes import split_boxes
from unshard.verify.contents import Mode, Pair, check_contents
from unshard.verify.reading import PlainReader

SOURCE, OUTPUT = SourceFile("source", "weights"), SourceFile("output", "weights")

shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)


def lying(shape: Sequence[int], order: Sequence[int]) -> tuple[Chunk, ...]:
    """The chunk of a tensor of this shape whose axes lie in the file in `order`, the outermost first."""
    stored = contiguous_chunk(SOURCE, 0, [shape[axis] for axis in order], F32)
    public = tuple([list(order).index(axis) for axis in range(len(shape))])
    return Tensor("w", F32, stored.box.sizes, (stored,)).transpose(public).chunks


@given(shapes, st.integers(1, 200), st.data())
def test_boxes_are_small_and_meet_each_element_once(shape: tuple[int, ...], most: int, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    met = np.zeros(shape, int)
    for box in split_boxes(shape, lying(shape, order), most):
        assert 0 < box.volume <= most
        met[tuple([slice(low, high) for low, high in zip(box.offsets, box.stops, strict=True)])] += 1
    assert (met == 1).all()


@given(shapes, st.integers(1, 200))
def test_what_lies_in_order_is_read_in_order(shape: tuple[int, ...], most: int) -> None:
    strides = row_major_strides(shape)
    boxes = list(split_boxes(shape, lying(shape, range(len(shape))), most))

    def start(box: Box) -> int:
        return sum([offset * stride for offset, stride in zip(box.offsets, strides, strict=True)])

    assert all(start(box) + box.volume == start(following) for box, following in pairwise(boxes))


@pytest.mark.parametrize("mode", ["full", "sample"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["row-major", "column-major"])
def test_a_column_major_tensor_is_not_read_column_by_column_for_each_band(
    order: tuple[int, int], mode: Mode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(0).random((16, 100_000), np.float32)
    (tmp_path / "source").mkdir()
    (tmp_path / "output").mkdir()
    (tmp_path / "source" / "weights").write_bytes(values.transpose(order).tobytes())
    (tmp_path / "output" / "weights").write_bytes(values.tobytes())
    reads: list[int] = []
    read = PlainReader._read

    def count(self: PlainReader, file: SourceFile, offset: int, size: int) -> object:
        reads.append(size)
        return read(self, file, offset, size)

    monkeypatch.setattr(PlainReader, "_read", count)
    expected = Tensor("w", F32, values.shape, lying(values.shape, order))
    found = Tensor("w", F32, values.shape, (contiguous_chunk(OUTPUT, 0, values.shape, F32),))
    roots = {"source": tmp_path / "source"}, {"output": tmp_path / "output"}
    result = check_contents([Pair(expected, found)], *roots, mode, Settings(), lambda event: None)
    assert not result.problems
    assert mode == "sample" or result.size == values.nbytes
    assert len(reads) < 200
