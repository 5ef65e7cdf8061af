"""Shards of DeepSpeed's tensor-parallel ranks joined: as declared, as Megatron does, by hand, or not at all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference import Array
from shards import Shelf, numbers
from unshard.errors import FormatError
from unshard.formats.deepspeed.patterns import Patterns
from unshard.formats.deepspeed.tensor_parallel import join_megatron_ranks, join_ranks

NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def join(shelf: Shelf, pieces: list[Array], info: Any, name: str = NAME, **more: Any) -> Any:
    """One parameter, joined: the array, or the text of all problems."""
    parts = [{name: shelf.put(name, piece)} for piece in pieces]
    joined = join_ranks(parts, info, **({"axes": {}} | more))
    if joined.problems:
        return "\n".join(str(problem) for problem in joined.problems)
    assert joined.tensors[name].name == name
    return shelf.array(joined.tensors[name])


def pieces_of(whole: Array, boxes: list[tuple[slice, ...]]) -> list[Array]:
    return [np.ascontiguousarray(whole[box]) for box in boxes]


def entry(shape: tuple[int, ...], ranks: list[list[tuple[int, int, int]]], axis: int) -> dict[str, Any]:
    """An affine map: per rank, blocks (start in the whole, start in the shard, size) along an axis."""

    def strides(sizes: tuple[int, ...]) -> list[int]:
        return [int(np.prod(sizes[place + 1 :])) for place in range(len(sizes))]

    def resized(size: int) -> tuple[int, ...]:
        return (*shape[:axis], size, *shape[axis + 1 :])

    held = {}
    for rank, blocks in enumerate(ranks):
        own = resized(sum(size for _, _, size in blocks))
        held[rank] = {
            "shard_shape": list(own),
            "pieces": [
                {
                    "shape": list(resized(size)),
                    "source": [start * strides(shape)[axis], strides(shape)],
                    "dest": [local * strides(own)[axis], strides(own)],
                    "locations": [rank],
                }
                for start, local, size in blocks
            ],
        }
    return {"logical_shape": list(shape), "ranks": held}


def affine(recorded: Any, version: int = 1) -> dict[str, Any]:
    return {"affine_map": {"version": version, "params": {"^" + NAME.replace(".", r"\.") + "$": recorded}}}


def test_what_nothing_speaks_of_lies_along_rows_evenly_or_not(shelf: Shelf) -> None:
    whole = numbers(7, 3)
    assert np.array_equal(join(shelf, [whole[:3], whole[3:5], whole[5:]], {}), whole)


def test_patterns_tell_columns_replicas_halves_and_padding(shelf: Shelf) -> None:
    whole = numbers(4, 6)
    columns = {"parameter_with_row_parallelism_patterns": [r"^model\.layers\.0\.mlp\.up_proj\.weight$"]}
    assert np.array_equal(join(shelf, pieces_of(whole, [np.s_[:, :4], np.s_[:, 4:]]), columns), whole)
    replicated = {"tp_replicated_parameter_patterns": [r"model.layers.\d+.mlp.up_proj"]}
    assert np.array_equal(join(shelf, [whole, whole], replicated), whole)
    halves = {"parameter_with_2_sub_params_cat_dim_0": [".*up_proj.weight"]}
    gated = [np.concatenate([whole[:1], whole[2:3]]), np.concatenate([whole[1:2], whole[3:]])]
    assert np.array_equal(join(shelf, gated, halves), whole)
    vocabulary = {"vocabulary_parameter_patterns": [".*up_proj"], "original_vocab_size": 3}
    assert np.array_equal(join(shelf, [whole[:2], whole[2:]], vocabulary), whole[:3])


@pytest.mark.parametrize("recorded", [True, False], ids=["widths", "before widths"])
def test_parts_of_a_fused_parameter_are_whole_one_after_the_other(shelf: Shelf, recorded: bool) -> None:
    whole = numbers(8, 2)
    info: dict[str, Any] = {
        "parameter_with_sub_params": [{"patterns": [".*up_proj"], "shape": ((4, 2, 2), 2), "partition_dim": 0}]
    }
    if recorded:
        info["sub_param_shard_widths"] = {".*up_proj": [[3, 1], [1, 1], [2, 0]]}
        held = [[0, 1, 2, 4, 6, 7], [3, 5]]
    else:
        held = [[0, 1, 4, 6], [2, 3, 5, 7]]
    assert np.array_equal(join(shelf, [whole[rows] for rows in held], info), whole)


def test_equal_parts_are_declared_by_their_number(shelf: Shelf) -> None:
    whole = numbers(6, 2)
    info = {"parameter_with_sub_params": [{"patterns": [".*"], "shape": (3, -1), "partition_dim": 0}]}
    assert np.array_equal(join(shelf, [whole[[0, 2, 4]], whole[[1, 3, 5]]], info), whole)


def test_an_affine_map_comes_before_patterns(shelf: Shelf) -> None:
    whole = numbers(6, 4)
    info = affine(entry((6, 4), [[(0, 0, 2), (5, 2, 1)], [(2, 0, 3)]], 0))
    info["tp_replicated_parameter_patterns"] = [".*"]
    assert np.array_equal(join(shelf, [whole[[0, 1, 5]], whole[2:5]], info), whole)


def test_an_affine_map_places_blocks_of_columns(shelf: Shelf) -> None:
    whole = numbers(3, 5)
    info = affine(entry((3, 5), [[(3, 0, 2)], [(0, 0, 3)]], 1))
    assert np.array_equal(join(shelf, pieces_of(whole, [np.s_[:, 3:], np.s_[:, :3]]), info), whole)


def test_a_block_that_all_ranks_hold_has_replicas(shelf: Shelf) -> None:
    whole = numbers(6, 2)
    info = affine(entry((6, 2), [[(0, 0, 2), (4, 2, 2)], [(2, 0, 2), (4, 2, 2)]], 0))
    parts = [{NAME: shelf.put(NAME, whole[rows])} for rows in ([0, 1, 4, 5], [2, 3, 4, 5])]
    joined = join_ranks(parts, info, axes={}).tensors[NAME]
    assert np.array_equal(shelf.array(joined), whole)
    assert len(joined.chunks) == 4
    assert len({chunk.box for chunk in joined.chunks}) == 3


def test_buffers_and_scalars_are_never_laid_behind_each_other(shelf: Shelf) -> None:
    scale = numbers(3)
    assert np.array_equal(join(shelf, [scale, scale], {}, buffers=[NAME]), scale)
    assert join(shelf, [numbers(1)[0].reshape(()), numbers(1)[0].reshape(())], {}).shape == ()


def test_the_users_own_table_is_asked_first(shelf: Shelf) -> None:
    whole = numbers(4, 2)
    replicated = {"tp_replicated_parameter_patterns": [".*"]}
    assert np.array_equal(join(shelf, [whole[:2], whole[2:]], replicated, axes={r".*up_proj\.weight": 0}), whole)
    assert np.array_equal(join(shelf, [whole, whole], None, axes={r".*\.weight": None}), whole)


@pytest.mark.parametrize(
    ("info", "said"),
    [
        (None, r"no universal_checkpoint_info.*\n  model\.layers\.0\.mlp\.up_proj\.weight \[\[2, 2\], \[2, 2\]\]"),
        ([1], "a list, not a dict"),
        ({"parameter_to_average_patterns": [".*"]}, "declared their mean"),
        ({"autotp_unsupported_parameter_patterns": {".*": "interleaved"}}, "no way to put .* together: interleaved"),
        ({"autotp_unsupported_parameter_patterns": 5}, "is no table of reasons"),
        ({"tp_replicated_parameter_patterns": ["(a+)+$"]}, r"no known kind:\n  \(a\+\)\+\$"),
        ({"tp_replicated_parameter_patterns": ["a*a*a*a*a*"]}, "no known kind"),
        ({"tp_replicated_parameter_patterns": "x"}, "is no list"),
        ({"vocabulary_parameter_patterns": [".*"], "original_vocab_size": 9}, "original_vocab_size is 9"),
        ({"affine_map": {"version": 2, "params": {}}}, "version 2; 1 is read"),
        (affine({"logical_shape": [4, 2]}), "lacks `ranks`"),
        (affine(entry((4, 2), [[(0, 0, 3)], [(3, 0, 1)]], 0)), r"rank 0 holds \[2, 2\], but its affine map says"),
        (affine(entry((4, 2), [[(0, 0, 2)], [(3, 0, 2)]], 0)), "outside"),
        ({"parameter_with_sub_params": [{"patterns": [".*"], "shape": (3,), "partition_dim": 4}]}, "malformed"),
        ({"parameter_with_sub_params": [{"patterns": [".*"], "shape": ((3, 2), 2), "partition_dim": 0}]}, "do not lie"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused(shelf: Shelf, info: Any, said: str) -> None:
    found = join(shelf, [numbers(2, 2), numbers(2, 2)], info)
    assert isinstance(found, str)
    assert re.search(said, found, re.DOTALL), found


def test_a_scaled_piece_is_refused(shelf: Shelf) -> None:
    recorded = entry((4, 2), [[(0, 0, 2)], [(2, 0, 2)]], 0)
    recorded["ranks"][1]["pieces"][0]["scale"] = 0.5
    assert "multiplied by 0.5" in join(shelf, [numbers(2, 2), numbers(2, 2)], affine(recorded))


def test_a_piece_with_other_strides_is_refused(shelf: Shelf) -> None:
    recorded = entry((4, 2), [[(0, 0, 2)], [(2, 0, 2)]], 0)
    recorded["ranks"][1]["pieces"][0]["source"] = [4, [1, 2]]
    assert "no block of [4, 2]" in join(shelf, [numbers(2, 2), numbers(2, 2)], affine(recorded))


def test_a_parameter_that_some_ranks_lack_is_named(shelf: Shelf) -> None:
    parts = [{NAME: shelf.put(NAME, numbers(2, 2))}, {}, {}]
    (problem,) = join_ranks(parts, {}, axes={}).problems
    assert problem.message == f"model-parallel ranks 1-2 have no `{NAME}`, which others have"


def test_all_unknown_parameters_are_one_error(shelf: Shelf) -> None:
    part = shelf.put_all({"a.weight": numbers(2), "b.weight": numbers(3)})
    (problem,) = join_ranks([part, part], None, axes={}).problems
    assert "a.weight" in problem.message
    assert "b.weight" in problem.message
    assert "[axes]" in (problem.hint or "")


def test_one_rank_is_the_whole(shelf: Shelf) -> None:
    part = shelf.put_all({"anything": numbers(2)})
    assert join_ranks([part], None, axes={}).tensors == part


def test_ten_thousand_patterns_are_looked_up() -> None:
    names = [f"model.layers.{number}.self_attn.q_proj.weight" for number in range(10_000)]
    table = Patterns([("^" + name.replace(".", r"\.") + "$", number) for number, name in enumerate(names)])
    assert [table.find(name) for name in names] == list(range(10_000))
    assert table.find(names[0] + "x") is None


def test_patterns_match_as_re_match_does() -> None:
    table = Patterns([(r"\d+.weight", 1), (r".*\.experts\.w[123]$", 2)])
    assert table.find("7.weight") == 1
    assert table.find("7.weight_scale") == 1
    assert table.find("x.7.weight") is None
    assert table.find("m.experts.w2") == 2
    assert table.find("m.experts.w2.more") is None
    with pytest.raises(FormatError):
        Patterns([("x" * 600, 1)])


def megatron_part(shelf: Shelf, rank: int) -> dict[str, Any]:
    layer = "language_model.encoder.layers.0"
    return shelf.put_all(
        {
            "language_model.embedding.word_embeddings.weight": numbers(8, 4)[4 * rank : 4 * rank + 4],
            f"{layer}.input_layernorm.weight": numbers(4),
            f"{layer}.self_attention.query_key_value.weight": numbers(12, 4)[6 * rank : 6 * rank + 6],
            f"{layer}.self_attention.dense.weight": np.ascontiguousarray(numbers(4, 4)[:, 2 * rank : 2 * rank + 2]),
            f"{layer}.mlp.dense_h_to_4h.weight": numbers(2, 2, 3, 4)[:, rank].reshape(6, 4),
            f"{layer}.mlp.dense_4h_to_h.weight": np.ascontiguousarray(numbers(4, 6)[:, 3 * rank : 3 * rank + 3]),
            "language_model.encoder.final_layernorm.weight": numbers(4),
        }
    )  # fmt: skip


def test_megatron_deepspeed_ends_in_the_canonical_catalog(shelf: Shelf) -> None:
    joined = join_megatron_ranks([megatron_part(shelf, 0), megatron_part(shelf, 1)], 3.0, {}, {})
    assert not joined.problems
    whole = {name: shelf.array(tensor) for name, tensor in joined.tensors.items()}
    assert np.array_equal(whole["embedding.word_embeddings.weight"], numbers(8, 4))
    assert np.array_equal(whole["decoder.layers.0.self_attention.linear_qkv.weight"], numbers(12, 4))
    assert np.array_equal(whole["decoder.layers.0.self_attention.linear_proj.weight"], numbers(4, 4))
    assert np.array_equal(whole["decoder.layers.0.mlp.linear_fc1.weight"], numbers(12, 4))
    assert np.array_equal(whole["decoder.layers.0.mlp.linear_fc2.weight"], numbers(4, 6))
    assert np.array_equal(whole["decoder.final_layernorm.weight"], numbers(4))
    assert len(whole) == 7


def test_what_megatrons_table_does_not_know_is_an_error(shelf: Shelf) -> None:
    parts = [megatron_part(shelf, rank) | shelf.put_all({"language_model.strange": numbers(2)}) for rank in (0, 1)]
    (problem,) = join_megatron_ranks(parts, 3.0, {}, {}).problems
    assert "language_model.strange" in problem.message


def test_what_a_checkpoint_makes_long_is_refused_before_it_is_matched(shelf: Shelf) -> None:
    """A regular expression with few quantifiers takes for ever where the name is long, or where there are very many."""
    found = join(shelf, [numbers(2), numbers(2)], {"tp_replicated_parameter_patterns": [".*a.*b.*c"]}, "a" * 100_000)
    assert "matched with no pattern" in found
    with pytest.raises(FormatError, match="over 1,000 patterns"):
        Patterns([(f".*{number}", 1) for number in range(1001)])
    recorded = entry((4, 2), [[(0, 0, 2)], [(2, 0, 2)]], 0)
    recorded["ranks"][0]["pieces"] *= 5000
    assert "at most 4,096 pieces" in join(shelf, [numbers(2, 2), numbers(2, 2)], affine(recorded))
