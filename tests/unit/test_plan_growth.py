"""A plan of a large model is made in seconds and grows with tensors x chunks only. Bounds are generous on purpose."""

from __future__ import annotations

import tracemalloc
from time import perf_counter

from synthetic import RankFiles, dense_70b, experts_671b, lay_out, megatron_671b
from unshard.dtypes import BF16
from unshard.options import MergeOptions
from unshard.plan.compiler import compile_plan
from unshard.plan.moves import Copy, Tile
from unshard.preparing import decide
from unshard.tensors import Box, Chunk, Tensor


def test_70b_over_64_ranks() -> None:
    """720 tensors x 64 ranks. Takes 0.3 s and 10 MB; a plan per row would take minutes."""
    target = lay_out(list(dense_70b()))
    started = perf_counter()
    plan = compile_plan(target)
    assert perf_counter() - started < 5
    moves = [move for file in plan.files for move in file.moves]
    assert sum(isinstance(move, Copy) for move in moves) == 560 * 64  # matrices: one copy for each shard
    assert sum(isinstance(move, Tile) for move in moves) == 160  # norms of 256 bytes a shard: one tile each
    assert plan.size == sum(tensor.size_in_bytes for tensor in dense_70b())


def test_memory_of_a_quarter_of_it() -> None:
    target = lay_out(list(dense_70b(layers=20)))
    tracemalloc.start()
    try:
        plan = compile_plan(target)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert plan.files
    assert peak < 10 << 20


def test_experts_of_all_layers_are_taken_apart_in_time_that_grows_with_the_experts() -> None:
    """61 layers of 256 experts, a chunk for each. Takes 0.2 s; a look at every chunk for every expert takes 30 s."""
    layers, experts, rows, width = 61, 256, 4096, 7168
    sizes = (1, 1, rows, width)
    files = RankFiles("rank_{}.pt")
    chunks = [
        Chunk(Box((layer, expert, 0, 0), sizes), files.save(expert // 16, sizes, BF16), expert // 16)
        for layer in range(layers)
        for expert in range(experts)
    ]
    packed = Tensor("experts", BF16, (layers, experts, rows, width), tuple(chunks))
    started = perf_counter()
    found = [expert for layer in packed.unstack() for expert in layer.unstack()]
    assert perf_counter() - started < 5
    assert [expert.chunks[0].extent.offset for expert in found] == [chunk.extent.offset for chunk in chunks]
    assert {expert.shape for expert in found} == {(rows, width)}


def test_671b_experts_of_16_pipeline_stages_by_16_expert_ranks() -> None:
    """46,848 tensors, whole on their ranks: experts that lie behind each other are one copy."""
    target = lay_out(list(experts_671b()))
    started = perf_counter()
    plan = compile_plan(target)
    assert perf_counter() - started < 15
    assert len(plan.files) > 250
    assert sum(len(file.moves) for file in plan.files) < 2000


def test_a_third_of_deepseek_v3_from_megatrons_catalog_to_a_plan() -> None:
    """13,000 tensors and as many chunks, translated, named, laid out and planned with their replicas. Takes 1.3 s."""
    checkpoint = megatron_671b(layers=20)
    started = perf_counter()
    decision = decide(checkpoint, MergeOptions())
    plan = compile_plan(decision.target, check_replicas=True)
    assert perf_counter() - started < 20
    assert len(decision.target.weights) == 17 * (256 * 3 + 5) + 20 * 9 + 3 * 3 + 3
    assert sum(isinstance(move, Tile) for file in plan.files for move in file.moves) == 0
