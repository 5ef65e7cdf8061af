"""Which layers lie on which pipeline stage: counted, recorded in arguments, and as megatron-core itself says."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unshard.errors import UnshardError
from unshard.formats.megatron.ranks.layers import first_layers, layers_of, parse_layout, recorded_counts


def first(found: dict[int, set[int]], stages: int, recorded: tuple[int, ...] | None = None) -> dict[int, int]:
    problems: list[UnshardError] = []
    offsets = first_layers(found, stages, recorded, problems)
    assert problems == []
    return offsets


class TestCounting:
    def test_a_stage_begins_where_those_before_it_end(self) -> None:
        assert first({0: {0, 1}, 1: {0}, 2: set(), 3: {0, 1, 2}}, 4) == {0: 0, 1: 2, 2: 3, 3: 3}

    def test_global_numbers_stay(self) -> None:
        assert first({0: {0, 1}, 1: {2, 3}}, 2) == {0: 0, 1: 0}

    def test_of_missing_stages_the_arguments_tell(self) -> None:
        assert first({1: {0, 1}, 3: {0}}, 4, (1, 2, 3, 1)) == {0: 0, 1: 1, 2: 3, 3: 6}

    def test_numbers_that_are_neither_local_nor_global(self) -> None:
        problems: list[UnshardError] = []
        first_layers({0: {0, 1}, 1: {1, 2}}, 2, None, problems)
        assert "stage 0 holds [0, 1]; stage 1 holds [1, 2]" in problems[0].message

    def test_numbers_in_names(self) -> None:
        names = ["decoder.layers.3.x.weight", "language_model.decoder.layers.4.y", "mtp.layers.9.z", "embedding.w"]
        assert layers_of([*names, "vision_model.decoder.layers.7.x"]) == {3, 4}


class TestArguments:
    @pytest.mark.parametrize(
        ("text", "counts"),
        [
            ("Ettt|(tt|)*29,m|L", (3, *[2] * 29, 0, 0)),
            ("Et*3|(tt|)*3mL", (3, 2, 2, 2, 0)),
            ("E|t*2|t*2|L", (0, 2, 2, 0)),
            ("E,t,(t|t)*2,L", (2, 2, 1)),
            ("t|*3t", (1, 0, 0, 1)),
        ],
    )
    def test_layout_strings(self, text: str, counts: tuple[int, ...]) -> None:
        assert parse_layout(text) == counts

    def test_layout_lists(self) -> None:
        assert parse_layout([["embedding", "decoder"], ["LayerType.decoder", "decoder"], ["loss"]]) == (1, 2, 0)

    @pytest.mark.parametrize("layout", ["Et(t|L", "Ex|L", "E(t*9)*9|L*", 7, [1, 2], "t*99999999999", "(t|t)*999999"])
    def test_layouts_that_say_nothing(self, layout: object) -> None:
        assert parse_layout(layout) is None

    @pytest.mark.parametrize(
        "facts",
        [
            {},
            {"num_layers": 5},
            {"num_layers": "4"},
            {"num_layers": 4, "standalone_embedding_stage": True},
            {"num_layers": 4, "decoder_first_pipeline_num_layers": 9},
            {"num_layers": 4, "pipeline_model_parallel_layout": "Ett|t|tL"},
            {
                "num_layers": 3,
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
        ],
        ids=str,
    )
    def test_arguments_that_do_not_tell(self, facts: dict[str, Any]) -> None:
        assert recorded_counts(facts, 2, 1) is None


@st.composite
def splits(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments that megatron-core accepts: even stages, uneven ends, counted embedding and loss, layouts."""
    ranks, chunks = draw(st.integers(2, 5)), draw(st.integers(1, 3))
    each = draw(st.integers(1, 3))
    facts: dict[str, Any] = {"ranks": ranks, "chunks": chunks}
    kind = draw(st.sampled_from(["even", "accounted", "uneven", "layout"]))
    if kind == "layout":
        counts = draw(st.lists(st.integers(0, 3), min_size=ranks * chunks, max_size=ranks * chunks))
        stages = [f"t*{count}" if count > 2 else "t" * count for count in counts]
        stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
        return facts | {"num_layers": sum(counts), "pipeline_model_parallel_layout": "|".join(stages)}
    if kind == "uneven":
        choices = [("first",), ("last",), ("first", "last")]
        if ranks == 2 and chunks > 1:  # megatron-core divides by the number of ranks between the ends
            choices.pop()
        ends = {end: chunks * draw(st.integers(1, 4)) for end in draw(st.sampled_from(choices))}
        middle = (ranks - len(ends)) * each * chunks
        facts |= {f"decoder_{end}_pipeline_num_layers": count for end, count in ends.items()}
        return facts | {"num_layers": sum(ends.values()) + middle}
    extra = {f"account_for_{part}_in_pipeline_split": draw(st.booleans()) for part in ("embedding", "loss")}
    extra = extra if kind == "accounted" else {}
    return facts | extra | {"num_layers": ranks * chunks * (each + bool(extra)) - sum(extra.values())}


@pytest.fixture(scope="module")
def oracle() -> Any:
    """(offset, number of layers) of a stage by megatron-core's own functions."""
    pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    return _ask_megatron


def _ask_megatron(facts: dict[str, Any], rank: int, chunk: int) -> tuple[int, int]:
    from megatron.core import parallel_state
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    virtual = facts["chunks"] if facts["chunks"] > 1 else None
    layout = facts.get("pipeline_model_parallel_layout")
    config = SimpleNamespace(
        num_layers=facts["num_layers"],
        pipeline_model_parallel_size=facts["ranks"],
        virtual_pipeline_model_parallel_size=virtual,
        num_layers_in_first_pipeline_stage=facts.get("decoder_first_pipeline_num_layers"),
        num_layers_in_last_pipeline_stage=facts.get("decoder_last_pipeline_num_layers"),
        account_for_embedding_in_pipeline_split=facts.get("account_for_embedding_in_pipeline_split", False),
        account_for_loss_in_pipeline_split=facts.get("account_for_loss_in_pipeline_split", False),
        pipeline_model_parallel_layout=layout and PipelineParallelLayerLayout(layout, facts["ranks"]),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: rank)
        patch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: facts["ranks"])
        patch.setattr(parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: virtual)
        patch.setattr(parallel_state, "is_inside_encoder", lambda: True, raising=False)
        stage = chunk if virtual else None
        return get_transformer_layer_offset(config, stage, rank), get_num_layers_to_build(config, stage, rank)


@pytest.mark.torch
@given(facts=splits())
def test_agrees_with_megatron_core(facts: dict[str, Any], oracle: Any) -> None:
    """Where the arguments put layers, and where counting puts them, megatron-core puts them too."""
    ranks, chunks = facts["ranks"], facts["chunks"]
    counts = recorded_counts(facts, ranks, chunks)
    assert counts is not None
    offsets = first({stage: set(range(count)) for stage, count in enumerate(counts)}, ranks * chunks, counts)
    for chunk, rank in product(range(chunks), range(ranks)):
        stage = chunk * ranks + rank
        assert (offsets[stage], counts[stage]) == oracle(facts, rank, chunk)


@pytest.mark.torch
@given(text=st.text(alphabet="EtmL|,()*23", max_size=24))
def test_reads_layouts_as_megatron_core_does(text: str) -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    try:
        stages = PipelineParallelLayerLayout.parse_str_to_list(text)
    except AssertionError:
        assert parse_layout(text) is None
    else:
        assert parse_layout(text) == tuple([stage.count(LayerType.decoder) for stage in stages])
