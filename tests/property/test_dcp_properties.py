"""Any cut of any tensors, in any order, over any files: the reader finds the same tensors again."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import dcp_bytes as db
from unshard.errors import IncompleteError
from unshard.formats.dcp.container import read_container
from unshard.plan.coverage import prove_coverage


@st.composite
def grids(draw: st.DrawFn) -> tuple[np.ndarray, list[tuple[slice, ...]]]:
    """An array, and the pieces into which cuts along every axis take it; some of them may be empty."""
    shape = draw(st.lists(st.integers(1, 6), max_size=3))
    array = np.arange(np.prod(shape, dtype=int), dtype=draw(st.sampled_from(["float32", "float16", "int64"])))
    pieces: list[tuple[slice, ...]] = [()]
    for length in shape:
        cuts = [0, *sorted(draw(st.lists(st.integers(0, length), max_size=2))), length]
        pieces = [(*piece, slice(a, b)) for piece in pieces for a, b in pairwise(cuts)]
    return array.reshape(shape), pieces


@settings(max_examples=60)
@given(st.lists(grids(), min_size=1, max_size=4), st.randoms(use_true_random=False), st.integers(1, 3))
def test_pieces_come_together_again(tensors: list, random, files: int) -> None:  # type: ignore[no-untyped-def, type-arg]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        writer = db.Writer(directory)
        work = []
        for number, (array, pieces) in enumerate(tensors):
            writer.declare(f"w{number}", array.shape, array.dtype.name)
            work += [(f"w{number}", array, piece) for piece in pieces]
        random.shuffle(work)
        written: dict[str, set[str]] = {}
        for key, array, piece in work:
            part = np.array(array[piece])
            file = f"__{random.randrange(files)}_0.distcp"
            writer.write(key, [bounds.start for bounds in piece], part, file, placed=part.size > 0)
            if part.size:
                written.setdefault(file, set()).add(key)
        writer.finish()
        container = read_container(directory, db.ROOT)
        assert container.problems == ()
        for number, (array, _) in enumerate(tensors):
            tensor = container.tensors[f"w{number}"]
            assert prove_coverage(tensor) == []
            np.testing.assert_array_equal(db.read_array(tensor, directory), array)

        lost = random.choice(sorted(written))
        (directory / lost).unlink()
        (problem,) = read_container(directory, db.ROOT).problems
        assert isinstance(problem, IncompleteError)
        assert f"{lost} (pieces of {len(written[lost])} tensor" in problem.message
