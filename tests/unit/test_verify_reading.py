"""Plain reads of pieces, as verification makes them: every type, every layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from unshard.dtypes import BY_NAME, DType
from unshard.tensors import Box, Chunk, Extent, SourceFile
from unshard.verify import reading
from unshard.verify.contents import same_bytes
from unshard.verify.reading import PlainReader

FILE = SourceFile("source", "shard")


@pytest.mark.parametrize("span", [reading.SMALL_SPAN, 0], ids=["in one span", "row by row"])
@pytest.mark.parametrize("dtype", BY_NAME.values(), ids=str)
def test_a_transposed_a_stepped_and_a_broadcast_piece(
    dtype: DType, span: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "SMALL_SPAN", span)
    monkeypatch.setattr(reading, "WASTE", 1)
    data = np.random.default_rng(0).integers(0, 2, 6 * 10 * dtype.itemsize, np.uint8)
    (tmp_path / "shard").write_bytes(b"x" * 5 + data.tobytes())
    whole, size = data.view(dtype.numpy).reshape(6, 10), dtype.itemsize
    with PlainReader({"source": tmp_path}) as reader:
        for array, strides in (
            (whole.T, (size, 10 * size)),
            (whole[::2, ::3], (20 * size, 3 * size)),
            (np.broadcast_to(whole[:, :1], (6, 4)), (10 * size, 0)),
        ):
            chunk = Chunk(Box.whole(array.shape), Extent(FILE, 5, strides, dtype), 0)
            assert same_bytes(reader.read(chunk, dtype), array)
