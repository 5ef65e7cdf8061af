"""Whatever the stage, the ranks, the groups and the shapes: masters and weights come out of ZeRO's partitions whole."""

from __future__ import annotations

import tempfile
from math import prod
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from assembled import gather
from deepspeed_bytes import BF16, Job, Weights, weights
from unshard.formats.contract import Source
from unshard.formats.deepspeed import DeepSpeed
from unshard.options import Weights as Choice
from unshard.plan.coverage import prove_coverage

SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple) | st.sampled_from([(0,), (3, 0), (97,), (1, 1, 41)])


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    stage = draw(st.sampled_from([None, 1, 2, 3]))
    groups: list[Weights] = []
    start = 1
    for number in range(draw(st.integers(1, 3))):
        shapes = draw(st.lists(SHAPES, min_size=1, max_size=6))
        groups.append(weights({f"g{number}.p{at}": shape for at, shape in enumerate(shapes)}, start))
        start += sum(prod(shape) for shape in shapes)
    frozen = draw(st.lists(SHAPES, max_size=2)) if stage in (2, 3) else []
    return Job(
        stage,
        draw(st.integers(1, 7)),
        groups,
        frozen=weights({f"frozen{at}": shape for at, shape in enumerate(frozen)}, dtype=BF16),
        buffers={"buffer": np.arange(5), "scale": np.ones((2, 2), np.float16)},
        shared={"again": "g0.p0"} if draw(st.booleans()) else {},
        low=draw(st.sampled_from([BF16, np.dtype(np.float16)])),
        trim=draw(st.booleans()),
        alignment=draw(st.sampled_from([1, 8])) if stage in (1, 2) else 1,
    )


@given(job=jobs(), choice=st.sampled_from(["master", "model"]))
@settings(max_examples=80)
def test_any_partitions(job: Job, choice: Choice) -> None:
    expected = job.masters() if choice == "master" else job.module()
    with tempfile.TemporaryDirectory() as name:
        place = job.write(Path(name) / "global_step7")
        checkpoint = DeepSpeed().read(Source(place, weights=choice))
        assert checkpoint.problems == ()
        assert checkpoint.weights == choice
        assert set(checkpoint.tensors) == set(expected)
        for tensor_name, array in expected.items():
            tensor = checkpoint.tensors[tensor_name]
            assert tensor.shape == array.shape
            assert tensor.dtype.numpy == array.dtype
            assert prove_coverage(tensor) == []
            assert gather(tensor, checkpoint.roots) == array.tobytes(), tensor_name
