"""Rules with values: each step is numpy's, and every table of a family read backwards is its inverse."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from random import Random
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import Array, Disk, cut_randomly, shard
from unshard.checkpoint import Dialect
from unshard.dtypes import F32
from unshard.families import FAMILIES
from unshard.families.architecture import Architecture, read_architecture
from unshard.families.rules import Rule, find_rule, join, split
from unshard.families.sizes import Sizes
from unshard.families.steps import (
    STEPS,
    Divide,
    FirstRows,
    Group,
    Norm,
    OnPart,
    Permute,
    Sections,
    Squeeze,
    Step,
    SwapHalves,
    Transpose,
    Ungroup,
    Unstack,
)
from unshard.tensors import Computed, Tensor, Value

Draw: TypeAlias = Callable[[int, int], int]


def place(disk: Disk, name: str, shape: Sequence[int], draw: Draw) -> tuple[Tensor, Array]:
    """A tensor cut at random, with values that are nowhere twice."""
    start = sum(len(file) for file in disk.files.values()) // 4
    array = np.arange(start, start + int(np.prod(shape)), dtype=np.float32).reshape(shape)
    return shard(disk, name, array, F32, cut_randomly(shape, draw)), array


def drawer(data: Any) -> Draw:
    return lambda low, high: int(data.draw(st.integers(low, high)))


# Steps ----------------------------------------------------------------------------------------------------------------

ROWS = ("a", "b", "b")


def sections(array: Array, groups: int, rows: Sequence[int]) -> list[Array]:
    """What numpy makes of groups of sections."""
    grouped = array.reshape(groups, sum(rows), -1)
    cuts = np.cumsum(rows)[:-1]
    return [part.reshape(-1, array.shape[1]) for part in np.split(grouped, cuts, axis=1)]


def grouped(parts: Sequence[Array], groups: int) -> Array:
    """The inverse, in numpy."""
    return np.concatenate([part.reshape(groups, -1, part.shape[1]) for part in parts], 1).reshape(-1, parts[0].shape[1])


def ungrouped(array: Array, groups: int, rows: Sequence[int]) -> Array:
    return np.concatenate(sections(array, groups, rows))


def flat_sections(array: Array, groups: int, rows: Sequence[int]) -> list[Array]:
    return np.split(array, np.cumsum([groups * count for count in rows])[:-1])


Forward: TypeAlias = Callable[[Array, int, Sequence[int]], Sequence[Array]]
CASES: dict[str, tuple[tuple[Step, ...], int, Forward]] = {
    "unstack": ((Unstack("number"),), 1, lambda x, g, r: list(x)),
    "divide": ((Divide(),), 2, lambda x, g, r: np.split(x, 2)),
    "divide columns": ((Divide(1),), 2, lambda x, g, r: np.split(x, 2, axis=1)),
    "sections": ((Sections(ROWS, "groups"),), 3, sections),
    "transpose": ((Transpose(),), 1, lambda x, g, r: [x.T]),
    "ungroup": ((Ungroup(ROWS, "groups"),), 1, lambda x, g, r: [ungrouped(x, g, r)]),
    "group": ((Group(ROWS, "groups"),), 1, lambda x, g, r: [grouped(flat_sections(x, g, r), g)]),
    "permute": (
        (Permute(("groups", "2", "?"), (1, 2, 0)),),
        1,
        lambda x, g, r: [x.reshape(g, 2, -1, x.shape[1]).transpose(1, 2, 0, 3).reshape(x.shape)],
    ),
    "permute columns": (
        (Permute(("2", "?"), (1, 0), axis=1),),
        1,
        lambda x, g, r: [x.reshape(len(x), 2, -1).swapaxes(1, 2).reshape(x.shape)],
    ),
    "swap_halves": ((SwapHalves(axis=1),), 1, lambda x, g, r: [np.roll(x, x.shape[1] // 2, axis=1)]),
    "first_rows": ((FirstRows("rows"),), 1, lambda x, g, r: [x]),
    "norm": ((Norm(),), 1, lambda x, g, r: [x]),
    "on_part": (
        (Divide(), OnPart(1, Transpose())),
        2,
        lambda x, g, r: [np.split(x, 2)[0], np.split(x, 2)[1].T],
    ),
}
"""Steps of a rule, its number of parts, and what numpy makes of [2 * groups * sum(rows), even] rows and columns."""


def test_every_step_has_a_case() -> None:
    used = {type(step) for steps, _, _ in CASES.values() for step in steps}
    assert used | {Squeeze} == set(STEPS.values())


@settings(max_examples=15, deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", CASES)
def test_a_step_does_what_numpy_does_and_back(name: str, data: Any) -> None:
    steps, parts, expected = CASES[name]
    draw, disk = drawer(data), Disk()
    groups, few, many = draw(1, 3), draw(1, 3), draw(1, 2)
    rows, columns = (2 * many, few, few), 2 * draw(1, 3)
    total = groups * sum(rows)
    sizes = Sizes({"groups": groups, "a": rows[0], "b": few, "rows": total})
    whole, array = place(disk, "w", (total, columns), draw)
    rule = Rule("w", tuple([f"p{part}" for part in range(parts)]), steps)
    pieces = rule.split(whole, sizes)
    wanted = expected(array, groups, rows)
    assert len(pieces) == len(wanted)
    for key, right in zip(sorted(pieces), wanted, strict=True):
        assert np.array_equal(disk.assemble(stored(pieces[key])), right)
    assert np.array_equal(disk.assemble(stored(rule.join(pieces, sizes))), array)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_a_stack_of_one_is_what_it_holds(data: Any) -> None:
    draw, disk, sizes = drawer(data), Disk(), Sizes({})
    whole, array = place(disk, "w", (1, draw(1, 4), draw(1, 4)), draw)
    rule = Rule("w", ("p",), (Squeeze(),))
    pieces = rule.split(whole, sizes)
    assert np.array_equal(disk.assemble(stored(pieces[()])), array[0])
    assert np.array_equal(disk.assemble(stored(rule.join(pieces, sizes))), array)


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_several_are_no_stack_of_one(shape: tuple[int, ...]) -> None:
    whole, _ = place(Disk(), "w", shape, lambda low, high: low)
    with pytest.raises(ValueError, match="first axis"):
        Rule("w", ("p",), (Squeeze(),)).split(whole, Sizes({}))


@given(st.integers(1, 5), st.integers(0, 3))
def test_the_padding_of_a_vocabulary_is_cut_and_not_made_up(rows: int, padding: int) -> None:
    disk, sizes = Disk(), Sizes({"rows": rows})
    whole, array = place(disk, "w", (rows + padding, 2), lambda low, high: low)
    rule = Rule("w", ("p",), (FirstRows("rows"),))
    (piece,) = rule.split(whole, sizes).values()
    assert np.array_equal(disk.assemble(stored(piece)), array[:rows])
    assert rule.join({(): piece}, sizes).shape == (rows, 2)


@pytest.mark.parametrize(("in_megatron", "in_file", "by"), [(0, 0, 0), (1, 1, 0), (1, 0, 1), (0, 1, -1)])
def test_norms_are_shifted_by_what_the_two_sides_differ(in_megatron: int, in_file: int, by: int) -> None:
    sizes = Sizes({}, facts={"apply_layernorm_1p": bool(in_megatron)})
    whole, _ = place(Disk(), "w", (4,), lambda low, high: low)
    rule = Rule("w", ("p",), (Norm(zero_centred=bool(in_file)),))
    there, back = rule.split(whole, sizes)[()], rule.join({(): whole}, sizes)
    if by == 0:
        assert (there, back) == (whole, whole)
    else:
        assert isinstance(there, Computed)
        assert isinstance(back, Computed)
        assert (there.parameters["by"], back.parameters["by"]) == (by, -by)


# Families -------------------------------------------------------------------------------------------------------------

DIALECTS: tuple[Dialect, ...] = ("megatron", "torchtitan")
TRANSLATED = [(dialect, name) for dialect in DIALECTS for name, family in FAMILIES.items() if family.table(dialect)]


def draw_config(model_type: str, draw: Draw) -> dict[str, Any]:
    """A config with every key that any family needs, of drawn sizes that fit together."""
    groups, latent = draw(1, 3), draw(1, 3)
    text = {
        "num_hidden_layers": 2, "vocab_size": draw(1, 9), "hidden_size": 2 * draw(1, 3),
        "num_key_value_heads": groups, "num_attention_heads": groups * draw(1, 3), "head_dim": 2 * draw(1, 2),
        "intermediate_size": draw(1, 4), "attention_bias": bool(draw(0, 1)), "mlp_bias": bool(draw(0, 1)),
        "use_qk_norm": True, "tie_word_embeddings": False, "num_nextn_predict_layers": draw(0, 2),
        "num_experts": draw(1, 3), "num_local_experts": draw(1, 3), "n_routed_experts": draw(1, 3),
        "moe_intermediate_size": draw(1, 3), "shared_expert_intermediate_size": draw(1, 3), "n_shared_experts": 1,
        "first_k_dense_replace": draw(0, 2), "mlp_only_layers": [0] * draw(0, 1),
        "q_lora_rank": latent if draw(0, 1) else None, "kv_lora_rank": latent, "qk_nope_head_dim": draw(1, 3),
        "qk_rope_head_dim": 2, "v_head_dim": draw(1, 3), "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": groups, "linear_num_value_heads": groups * draw(1, 2),
        "linear_key_head_dim": draw(1, 3), "linear_value_head_dim": draw(1, 3),
    }  # fmt: skip
    heads = draw(1, 2)
    vision = {
        "depth": 1, "num_hidden_layers": 1, "hidden_size": 2 * heads, "embed_dim": 2 * heads, "num_heads": heads,
        "num_attention_heads": heads, "mlp_ratio": 2, "intermediate_size": draw(1, 3), "image_size": 4, "patch_size": 2,
        "out_hidden_size": text["hidden_size"], "num_position_embeddings": 4, "deepstack_visual_indexes": [0],
        "vision_use_head": False,
    }  # fmt: skip
    if FAMILIES[model_type].heads == ("ForConditionalGeneration",):
        return {"model_type": model_type, "text_config": text, "vision_config": vision}
    return {"model_type": model_type, **text}


REPEATED = re.compile(r".*\.layers\.[0-9]+\.(embed_tokens|shared_head\.head)\.weight")
"""What files repeat in layers that predict further tokens, and training has once."""


def file_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """All that the file of a model can hold."""
    shapes = architecture.hub_shapes() | architecture.hub_head_shapes(tied=False)
    for _, extra in architecture.extra_shapes():
        shapes |= extra
    return {name: shape for name, shape in shapes.items() if not REPEATED.fullmatch(name)}


def stored(value: Value) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def assemble_all(disk: Disk, tensors: Mapping[str, Value]) -> dict[str, Array]:
    return {name: disk.assemble(stored(value)) for name, value in tensors.items()}


def assert_equal(found: Mapping[str, Array], right: Mapping[str, Array]) -> None:
    assert sorted(found) == sorted(right)
    assert [name for name in right if not np.array_equal(found[name], right[name])] == []


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("dialect", "model_type"), TRANSLATED)
def test_the_table_of_a_family_read_backwards_is_its_inverse(dialect: Dialect, model_type: str, seed: int) -> None:
    draw, rules = Random(f"{model_type} {seed}").randint, FAMILIES[model_type].table(dialect)
    architecture = read_architecture(draw_config(model_type, draw), FAMILIES)
    assert architecture is not None
    sizes, disk = architecture.sizes, Disk()
    file, arrays = {}, {}
    for name, shape in file_shapes(architecture).items():
        file[name], arrays[name] = place(disk, name, shape, draw)

    wholes = join(file, rules, sizes)
    assert not wholes.problems
    assert [name for name in wholes.tensors if find_rule(name, rules) is None] == []
    shifted = {name: value for name, value in wholes.tensors.items() if isinstance(value, Computed)}
    for name in shifted:  # norms that one side uses otherwise: theirs is another test
        assert name.endswith("norm.weight")
        for part in wholes.origins[name]:
            del file[part], arrays[part]
        del wholes.tensors[name]
    parts = split(wholes.tensors, rules, sizes)
    assert not [*parts.problems, *parts.unknown]
    assert_equal(assemble_all(disk, parts.tensors), arrays)

    stored_ones, arrays = {}, {}
    for name, value in wholes.tensors.items():
        stored_ones[name], arrays[name] = place(disk, name, value.shape, draw)
    there = split(stored_ones, rules, sizes)
    assert not [*there.problems, *there.unknown]
    back = join(there.tensors, rules, sizes)
    assert not back.problems
    assert_equal(assemble_all(disk, back.tensors), arrays)


SHAPES = [(), (0,), (1,), (3,), (2, 2), (0, 2), (4, 0), (0, 2, 2), (2, 3, 4), (2, 3, 4, 5)]


@pytest.mark.parametrize(("dialect", "model_type"), TRANSLATED)
def test_whatever_shape_is_stored_is_taken_apart_or_told(dialect: Dialect, model_type: str) -> None:
    rules = FAMILIES[model_type].table(dialect)
    sizes = Sizes(draw_config(model_type, Random(model_type).randint), FAMILIES[model_type].all_defaults())
    for rule, shape in product(rules, SHAPES):
        name = re.sub(r"\{[a-z_]+\}", "0", rule.whole)
        found = split({name: Tensor(name, F32, shape, ())}, rules, sizes)
        assert found.tensors or found.problems or shape[0] == 0, (name, shape)
