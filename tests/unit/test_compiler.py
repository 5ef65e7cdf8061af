"""Which moves a tensor becomes, and what is refused before any byte moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from synthetic import ROOTS, RankFiles, lay_out, shard_rows
from unshard.dtypes import BF16, F32, U8, DType
from unshard.errors import IncompleteError
from unshard.plan.compiler import compile_plan
from unshard.plan.explain import explain, tally
from unshard.plan.layout import lay_out_tensor
from unshard.plan.moves import Compute, Copy, Literal, Move, Tile
from unshard.plan.proof import file_faults, is_inside, plan_faults
from unshard.target import Claim, Seal, Target, TargetFile
from unshard.tensors import Box, Chunk, Computed, Encoded, Tensor, concat, stack

KIB, MIB = 1 << 10, 1 << 20


def sharded(*shape: int, ranks: int = 4, axis: int = 0, dtype: DType = BF16, alignment: int = 64) -> Tensor:
    return shard_rows("w", shape, dtype, list(range(ranks)), RankFiles("rank_{}.pt", alignment), axis=axis)


def kinds(moves: list[Move]) -> list[str]:
    return [f"{type(move).__name__} {move.size}" for move in moves]


def encoded(tensor: Tensor) -> Tensor:
    chunks = []
    for chunk in tensor.chunks:
        extent = chunk.extent
        file = replace(extent.file, encoded=Encoded("zstd", 0, 9, 1 << 40))
        chunks.append(replace(chunk, extent=replace(extent, file=file)))
    return replace(tensor, chunks=tuple(chunks))


def test_row_shards_of_the_stored_type_are_copied() -> None:
    moves = lay_out_tensor(sharded(4096, 1024), 1000)
    assert kinds(moves) == ["Copy 2097152"] * 4
    assert [move.destination for move in moves] == [1000 + n * 2 * MIB for n in range(4)]
    assert [str(move.file) for move in moves if isinstance(move, Copy)] == [f"rank_{n}.pt" for n in range(4)]


def test_uneven_and_empty_shards_are_copied() -> None:
    moves = lay_out_tensor(sharded(9, 64 * KIB, ranks=8), 0)
    assert kinds(moves) == ["Copy 262144"] * 4 + ["Copy 131072"]


def test_column_shards_are_gathered_where_runs_are_short() -> None:
    (tile,) = lay_out_tensor(sharded(4096, 1024, axis=1), 8)
    assert isinstance(tile, Tile)
    assert (tile.destination, tile.shape, len(tile.pieces)) == (8, (4096, 1024), 4)


def test_column_shards_are_copied_where_runs_are_long() -> None:
    assert kinds(lay_out_tensor(sharded(3, 2 * MIB, axis=1), 0)) == ["Copy 1048576"] * 12
    assert kinds(lay_out_tensor(sharded(3, 2 * MIB - 4, axis=1), 0)) == [f"Tile {6 * (2 * MIB - 4)}"]


def test_experts_packed_along_the_first_axis_are_cut_there() -> None:
    """Sharded along rows of each expert: an expert's rows lie together in each shard."""
    packed = sharded(3, 4096, 1024, axis=1)
    assert kinds(lay_out_tensor(packed, 0)) == ["Copy 2097152"] * 12
    assert kinds(lay_out_tensor(packed.select(0, 1), 0)) == ["Copy 2097152"] * 4
    stacked = stack([sharded(64, 64, axis=1, dtype=F32), sharded(64, 64, dtype=F32, ranks=1)])
    assert kinds(lay_out_tensor(stacked, 0)) == ["Tile 16384", "Copy 16384"]


def test_transposed_tensors_are_gathered() -> None:
    assert kinds(lay_out_tensor(sharded(1024, 1024, ranks=1).transpose(), 0)) == [f"Tile {2 * MIB}"]
    assert kinds(lay_out_tensor(sharded(1024, 1, ranks=1, dtype=F32).transpose(), 0)) == ["Copy 4096"]


def test_cast_tensors_are_gathered_in_lines() -> None:
    moves = lay_out_tensor(sharded(4096, 1024, dtype=F32).cast(BF16), 0)
    assert kinds(moves) == [f"Tile {2 * MIB}"] * 4
    assert all(isinstance(move, Tile) and move.shape == (MIB,) for move in moves)
    assert kinds(lay_out_tensor(sharded(512, 512, dtype=F32).cast(BF16), 0)) == [f"Tile {512 * KIB}"]


def test_tiny_shards_are_gathered_but_not_one_alone() -> None:
    (tile,) = lay_out_tensor(sharded(8192, ranks=64), 0)
    assert isinstance(tile, Tile)
    assert (tile.shape, len(tile.pieces)) == ((8192,), 64)
    assert kinds(lay_out_tensor(sharded(8192, ranks=1), 0)) == ["Copy 16384"]
    assert kinds(lay_out_tensor(sharded(64, 256, ranks=2), 0)) == ["Copy 16384"] * 2


def test_boxes_that_continue_each_other_in_the_file_are_one_copy() -> None:
    """A split and a regrouping cut a shard into boxes; its bytes still lie together."""
    tensor = sharded(48, 1024, ranks=5).reshape((4, 3, 4, 1024)).reshape((48, 1024))
    assert len(tensor.chunks) > 5
    assert kinds(lay_out_tensor(tensor, 0)) == kinds(lay_out_tensor(sharded(48, 1024, ranks=5), 0))


def test_encoded_chunks_are_never_copied() -> None:
    assert kinds(lay_out_tensor(encoded(sharded(4096, 1024)), 0)) == [f"Tile {2 * MIB}"] * 4
    assert kinds(lay_out_tensor(encoded(sharded(4, 2 * MIB, axis=1)), 0)) == [f"Tile {16 * MIB}"]
    scalar = encoded(Tensor("w", F32, (), (Chunk(Box((), ()), sharded(1).chunks[0].extent, 0),)))
    scalar = replace(scalar, chunks=(replace(scalar.chunks[0], extent=replace(scalar.chunks[0].extent, strides=())),))
    assert [type(move) for move in lay_out_tensor(scalar, 0)] == [Tile]


def test_scalars_and_tensors_without_elements() -> None:
    assert kinds(lay_out_tensor(sharded(1, ranks=1, dtype=F32).reshape(()), 5)) == ["Copy 4"]
    assert lay_out_tensor(sharded(0, 7), 5) == []


def test_repeated_rows_are_gathered_or_copied_by_their_length() -> None:
    assert kinds(lay_out_tensor(sharded(1, 64, ranks=1).broadcast(0, 9), 0)) == ["Tile 1152"]
    assert kinds(lay_out_tensor(sharded(1, MIB, ranks=1).broadcast(0, 2), 0)) == [f"Copy {2 * MIB}"] * 2


def test_neighbouring_strided_spans_share_a_tile_up_to_its_size() -> None:
    turned = sharded(64, 256, ranks=1, dtype=F32).transpose()
    assert kinds(lay_out_tensor(concat([turned] * 3), 0)) == [f"Tile {3 * 64 * KIB}"]
    assert kinds(lay_out_tensor(concat([turned] * 20), 0)) == [f"Tile {16 * 64 * KIB}", f"Tile {4 * 64 * KIB}"]


def test_tensors_that_lie_together_are_one_copy() -> None:
    files = RankFiles("rank_{}.pt", alignment=1)
    tensors = [shard_rows(name, (100, 100), F32, [0], files) for name in "abc"]
    assert kinds(list(compile_plan(lay_out(tensors)).files[0].moves)) == ["Copy 120000"]


def test_all_problems_of_all_tensors_are_raised_at_once() -> None:
    holed = [replace(sharded(8, 4), name=name, chunks=sharded(8, 4).chunks[:3]) for name in "ab"]
    claim = Claim(replace(holed[0], name="tied"), holed[0], "the embeddings differ")
    computed = Computed("c", BF16, (8, 4), "fuse", {}, (replace(holed[0], name="base"),), (0,))
    target = replace(lay_out([*holed, sharded(8, 4)]), claims=(claim,))
    extra = TargetFile("more", 64, tensors=((0, computed),))
    with pytest.raises(IncompleteError) as caught:
        compile_plan(replace(target, files=(*target.files, extra)))
    for name in ("a", "b", "tied", "base"):
        assert caught.value.message.count(f" {name} (BF16") == 1
    assert "4 problems" in caught.value.message
    assert "no piece holds [6:8, 0:4]" in caught.value.message


def test_a_layout_with_holes_or_overlaps_is_refused() -> None:
    tensor = sharded(8, 4)
    for offset, literal, message in ((2, b"", "nothing writes bytes 0 to 2"), (0, b"xx", "written twice")):
        file = TargetFile("f", 66, ((0, literal),), ((offset, tensor),))
        with pytest.raises(ValueError, match=message):
            compile_plan(Target((file,), ROOTS))
    with pytest.raises(ValueError, match="past the end"):
        compile_plan(Target((TargetFile("f", 63, (), ((0, tensor),)),), ROOTS))
    with pytest.raises(ValueError, match="nothing writes bytes 64 to 65"):
        compile_plan(Target((TargetFile("f", 65, (), ((0, tensor),)),), ROOTS))


def test_computed_values_carry_their_operands() -> None:
    base, bias = sharded(8, 4), sharded(4, ranks=1)
    value = Computed("w", F32, (8, 4), "add", {"scale": 2}, (base, bias), (0, None))
    (move,) = compile_plan(Target((TargetFile("f", 128, (), ((0, value),)),), ROOTS)).files[0].moves
    assert isinstance(move, Compute)
    assert [operand.banded for operand in move.operands] == [0, None]
    assert [len(operand.pieces) for operand in move.operands] == [4, 1]
    assert (move.function, move.parameters, move.size) == ("add", {"scale": 2}, 128)


def test_replicas_are_claimed_on_request() -> None:
    once = sharded(8, 4)
    twice = replace(
        once, chunks=once.chunks + tuple(replace(c, rank=9) for c in sharded(8, 4, alignment=4096).chunks[1:])
    )
    moved = [Chunk(c.box, replace(c.extent, offset=c.extent.offset + 512), c.rank) for c in twice.chunks[4:]]
    target = lay_out([replace(twice, chunks=(*once.chunks, *moved))])
    assert compile_plan(target).claims == ()
    claims = compile_plan(target, check_replicas=True).claims
    assert [claim.right.chunks[0].rank for claim in claims] == [9, 9, 9]
    assert compile_plan(target).files == compile_plan(lay_out([once])).files


def plan_of(*moves: Move, size: int, seals: tuple[Seal, ...] = (), path: str = "f"):
    whole = compile_plan(lay_out([sharded(8, 4)]))
    return replace(whole, files=(replace(whole.files[0], path=path, size=size, moves=moves, seals=seals),))


COPY = lay_out_tensor(sharded(8, 4, ranks=1), 0)[0]
TILE = lay_out_tensor(sharded(8, 4, axis=1), 0)[0]


@pytest.mark.parametrize(
    ("plan", "fault"),
    [
        (plan_of(COPY, size=64, path="../f"), "no path below the output"),
        (plan_of(COPY, size=64, path="/f"), "no path below the output"),
        (plan_of(COPY, COPY, size=64), "written twice"),
        (plan_of(COPY, Literal(64, b""), size=64), "is empty"),
        (plan_of(Literal(64, b"x"), COPY, size=65), "nothing writes bytes 0 to 64"),
        (plan_of(COPY, size=64, seals=(Seal(60, 0, 60),)), "would overwrite"),
        (plan_of(COPY, Literal(64, b"1234"), size=68, seals=(Seal(65, 0, 64),)), "does not follow"),
        (plan_of(COPY, Literal(64, b"1234"), size=68, seals=(Seal(64, 0, 65),)), "does not follow"),
        (plan_of(replace(COPY, offset=-1), size=64), "begins at byte -1"),
        (plan_of(replace(COPY, file=replace(COPY.file, root="other")), size=64), "no root of the plan"),
        (plan_of(replace(COPY, file=replace(COPY.file, path="a/../../b")), size=64), "no path below the root"),
        (plan_of(replace(TILE, pieces=TILE.pieces[1:]), size=64), "no piece holds"),
        (plan_of(replace(TILE, pieces=TILE.pieces[:1] + TILE.pieces), size=64), "stands twice"),
        (plan_of(replace(TILE, dtype=U8, shape=(8, 8)), size=64), "cannot be cast"),
        (plan_of(replace(TILE, shape=(32,)), size=64), "strides"),
    ],
)  # fmt: skip
def test_unsound_plans_are_told_why(plan, fault) -> None:
    assert any(fault in found for found in plan_faults(plan)), plan_faults(plan)


def test_sound_plans_have_no_faults() -> None:
    assert plan_faults(plan_of(TILE, Literal(64, b"1234"), size=68, seals=(Seal(64, 0, 64),))) == []
    assert file_faults(compile_plan(lay_out([])).files[0]) == []
    assert is_inside("folder/model.safetensors")
    assert not any(is_inside(path) for path in ("", "/a", "a//b", "a/", "./a", "a/..", "a\\b", "a\0"))


def test_a_plan_is_told_in_words() -> None:
    target = lay_out([sharded(4096, 1024), sharded(8192, ranks=64), sharded(64, 64, dtype=F32).cast(BF16)])
    plan = compile_plan(target)
    assert [(entry.kind, entry.count) for entry in tally(plan.files[0].moves)] == [("copy", 4), ("tile", 2)]
    lines = explain(plan, target)
    assert lines[0] == "1 file, 8.41 MB: 4 copies (8.39 MB), 2 tiles (24.6 kB)"
    assert lines[1] == "reads checkpoint at /nowhere"
    assert lines[3:] == [
        "  w  BF16 [4096, 1024]  8.39 MB: 4 copies",
        "  w  BF16 [8192]  16.4 kB: 1 tile",
        "  w  BF16 [64, 64]  8.19 kB: 1 tile",
    ]
    assert len(explain(plan)) == 3
