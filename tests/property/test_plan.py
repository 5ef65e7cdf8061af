"""Running any plan byte by byte equals assembling with numpy, also after a journey through JSON."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from drawing import apply_random, draw_tensor, shapes
from reference import Array, Disk, interpret
from unshard.dtypes import BF16, F32, I16, I64, DType
from unshard.errors import FormatError
from unshard.plan import layout
from unshard.plan.compiler import compile_plan
from unshard.plan.document import from_json, to_json
from unshard.plan.explain import explain
from unshard.plan.moves import Copy, Plan
from unshard.plan.proof import plan_faults
from unshard.target import Claim, Seal, Target, TargetFile
from unshard.tensors import Computed, Tensor

THRESHOLDS = [
    {"LONG_RUN": layout.LONG_RUN},
    {"LONG_RUN": 1, "SHORT_RUN": 0},
    {"LONG_RUN": 8, "SHORT_RUN": 8, "TILE_SIZE": 16},
    {"SHORT_RUN": 0, "TILE_SIZE": 1},
]
"""Sizes at which runs are copied and tiles are split; small ones bring every branch to small tensors."""


def draw_value(data: st.DataObject, disk: Disk, number: int) -> tuple[Tensor, Array]:
    dtype = data.draw(st.sampled_from([F32, F32, BF16, I16, I64]))
    tensor, array = draw_tensor(data.draw, disk, data.draw(shapes(0, 3)), dtype, f"t{number}")
    for _ in range(data.draw(st.integers(0, 4))):
        tensor, array = apply_random(data.draw, tensor, array)
    return tensor.rename(f"t{number}"), array


def halve(inputs: list[Array], parameters: dict[str, float]) -> Array:
    return inputs[0] * np.asarray(parameters["factor"], inputs[0].dtype)


def draw_target(data: st.DataObject, disk: Disk) -> tuple[Target, dict[str, bytes]]:
    """Two files with headers, tensors, computed values and seals, in any order; and the bytes they must have."""
    files, expected, claims = [], {}, []
    for path in ("a/model.bin", "model.index.json"):
        written = data.draw(st.binary(max_size=9))
        literals: list[tuple[int, bytes]] = [(0, written)]
        placed: list[tuple[int, Tensor | Computed]] = []
        for number in range(data.draw(st.integers(0, 3))):
            tensor, array = draw_value(data, disk, number)
            if tensor.dtype.is_float and data.draw(st.booleans()):
                banded = 0 if tensor.shape else None
                placed.append(
                    (
                        len(written),
                        Computed(
                            tensor.name, tensor.dtype, tensor.shape, "halve", {"factor": 0.5}, (tensor,), (banded,)
                        ),
                    )
                )
                array = (array * np.asarray(0.5, array.dtype)).astype(array.dtype)
            else:
                placed.append((len(written), tensor))
                claims.append(
                    Claim(tensor, tensor.rename("twin"), "they differ", data.draw(st.sampled_from([None, "mend"])))
                )
            written += array.tobytes()
        literals.append((len(written), b"\0\0\0\0"))
        written += b"\0\0\0\0"
        seals = (Seal(len(written) - 4, 0, len(written) - 4),)
        order = data.draw(st.permutations(placed))
        files.append(TargetFile(path, len(written), tuple(literals[::-1]), tuple(order), seals, path.endswith("json")))
        expected[path] = written
    return Target(tuple(files), {"disk": Path("/disk")}, tuple(claims)), expected


@settings(max_examples=300)
@given(st.data())
def test_any_plan_writes_the_assembled_bytes(data: st.DataObject) -> None:
    disk = Disk()
    target, expected = draw_target(data, disk)
    with patch.multiple(layout, **data.draw(st.sampled_from(THRESHOLDS))):
        plan = compile_plan(target)
    assert interpret(plan, disk, {"halve": halve}) == expected
    assert plan_faults(plan) == []
    assert plan.claims == target.claims
    assert explain(plan, target)
    for file in plan.files:
        for last, move in zip(file.moves, file.moves[1:], strict=False):
            if isinstance(last, Copy) and isinstance(move, Copy):
                assert (last.file, last.offset + last.size) != (move.file, move.offset)

    document = json.loads(json.dumps(to_json(plan)))
    assert from_json(document) == plan


def places(value: object) -> list[tuple[dict | list, str | int]]:
    """Every place of a document: the container and the key."""
    found: list[tuple[dict | list, str | int]] = []
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        found.append((value, key))
        found += places(inner)
    return found


WRECKS = [None, True, -1, 1.5, 1 << 80, "", "../x", "F99", [], [[]], {}, {"kind": "copy"}, 7]


@settings(max_examples=300)
@given(st.data())
def test_a_wrecked_document_is_refused_or_sound(data: st.DataObject) -> None:
    """Whatever stands at any place: a FormatError, or a plan that passes the proof; never another exception."""
    target, _ = draw_target(data, Disk())
    document = json.loads(json.dumps(to_json(compile_plan(target))))
    container, key = data.draw(st.sampled_from(places(document)))
    if data.draw(st.booleans()):
        container[key] = data.draw(st.sampled_from(WRECKS))
    else:
        del container[key]
    try:
        plan = from_json(document)
    except FormatError:
        return
    assert isinstance(plan, Plan)
    assert plan_faults(plan) == []


@given(st.data(), st.sampled_from([F32, BF16]))
def test_a_plan_reads_each_element_once(data: st.DataObject, dtype: DType) -> None:
    """Replicas do not make the plan longer: what it reads is as many elements as the tensor has."""
    disk = Disk()
    tensor, array = draw_tensor(data.draw, disk, data.draw(shapes(1, 3)), dtype, "t")
    plan = compile_plan(Target((TargetFile("f", array.nbytes, tensors=((0, tensor),)),), {"disk": Path("/")}))
    read = 0
    for move in plan.files[0].moves:
        read += move.size // dtype.itemsize if isinstance(move, Copy) else sum(p.box.volume for p in move.pieces)
    assert read == prod(tensor.shape)
