"""Names without wrappers, kinds without weights, and shards of fused matrices joined."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assembled import ROOT, gather, store
from unshard.dtypes import BF16, F32, I32
from unshard.formats.megatron.names import Skipped, kind_without_weights, strip_wrappers
from unshard.formats.megatron.sections import (
    delta_net_convolution_sizes,
    delta_net_sizes,
    join_along,
    join_gated,
    join_replicas,
    join_sections,
    mamba_convolution_sizes,
    mamba_sizes,
)


class TestNames:
    @pytest.mark.parametrize(
        ("stored", "name"),
        [
            ("decoder.layers.0.x", "decoder.layers.0.x"),
            ("module.decoder.x", "decoder.x"),
            ("model.module.module.decoder.x", "decoder.x"),
            ("model.decoder.x", "decoder.x"),
            ("model0.module.decoder.x", "decoder.x"),
            ("language_model.decoder.x", "language_model.decoder.x"),
            ("modules.decoder.x", "modules.decoder.x"),
            ("decoder.linear_qkv.to_wrap.weight", "decoder.linear_qkv.weight"),
        ],
    )
    def test_wrappers(self, stored: str, name: str) -> None:
        assert strip_wrappers(stored) == name

    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("decoder.layers.0.mlp.linear_fc1._extra_state", "*._extra_state"),
            ("decoder.layers.mlp.linear_fc1._extra_state/shard_0_28", "*._extra_state"),
            ("mlp.experts.linear_fc1._extra_state3", "*._extra_state"),
            ("decoder.layers.0.mlp.router.local_tokens_per_expert", "*.local_tokens_per_expert"),
            ("language_model.rotary_pos_emb.inv_freq", "*.inv_freq"),
            ("optimizer.state.exp_avg.decoder.x", "optimizer"),
            ("chained_1.optimizer.state", "optimizer"),
            ("rng_state/shard_0.0_1.1", "rng_state"),
            ("opt_param_scheduler", "opt_param_scheduler"),
        ],
    )
    def test_kinds_without_weights(self, name: str, kind: str) -> None:
        found = kind_without_weights(name)
        assert found is not None
        assert found[0] == kind

    @pytest.mark.parametrize(
        "name", ["decoder.x.weight", "mlp.router.expert_bias", "optimizers.weight", "my_rng_state"]
    )
    def test_weights(self, name: str) -> None:
        assert kind_without_weights(name) is None

    def test_are_counted_by_kind(self) -> None:
        skipped = Skipped()
        assert skipped.take("a._extra_state")
        assert skipped.take("b._extra_state")
        assert not skipped.take("b.weight")
        skipped.add("c", "no tensor, but the value None")
        assert skipped.lines() == {
            "*._extra_state": "state of TransformerEngine's FP8 scaling, no weights (2 entries)",
            "c": "no tensor, but the value None",
        }


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    ranks=st.integers(1, 5),
    axis=st.integers(0, 2),
    seed=st.integers(0, 9),
)
def test_sections_are_whole_again(
    sizes: list[int], ranks: int, axis: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """However ranks cut sections: numpy's own cuts of a whole matrix, joined, are that matrix."""
    directory = tmp_path_factory.mktemp("shards")
    total = sum(sizes) * ranks
    whole = np.arange(3 * 2 * total).reshape((3, 2, total)).swapaxes(axis, 2)
    bounds = np.cumsum([size * ranks for size in sizes])[:-1]
    cuts = [np.split(section, ranks, axis) for section in np.split(whole, bounds, axis)]
    shapes = {f"r{rank}": np.concatenate([cut[rank] for cut in cuts], axis) for rank in range(ranks)}
    stored = store(directory, {name: (I32, shard.shape) for name, shard in shapes.items()}, seed)
    (directory / "raw").write_bytes(write(stored, shapes, directory))
    joined = join_sections(list(stored.values()), axis, sizes)
    assert joined.shape == whole.shape
    assert gather(joined, {ROOT: directory}) == whole.astype(np.int32).tobytes()
    if len(sizes) == 1:
        assert join_along(list(stored.values()), axis).chunks == joined.chunks
    if len(sizes) == 2 and sizes[0] == sizes[1]:
        assert join_gated(list(stored.values()), axis) == joined


def write(stored: dict[str, object], shards: dict[str, np.ndarray], directory: Path) -> bytes:
    """The raw file with the shards' values where `store` put tensors of their shapes."""
    data = bytearray((directory / "raw").read_bytes())
    for name, tensor in stored.items():
        (chunk,) = tensor.chunks  # type: ignore[attr-defined]
        values = shards[name].astype(np.int32).tobytes()
        data[chunk.extent.offset : chunk.extent.offset + len(values)] = values
    return bytes(data)


def test_replicas_are_chunks_of_one_tensor(tmp_path: Path) -> None:
    tensors = store(tmp_path, {"a": (F32, (3,)), "b": (F32, (3,)), "c": (BF16, (3,)), "d": (F32, (4,))})
    joined = join_replicas([tensors["a"], tensors["b"]])
    assert [chunk.box for chunk in joined.chunks] == [tensors["a"].chunks[0].box] * 2
    for other in ("c", "d"):
        with pytest.raises(ValueError, match="replicas differ"):
            join_replicas([tensors["a"], tensors[other]])


def test_an_odd_number_of_rows_is_no_gate_and_up(tmp_path: Path) -> None:
    tensors = store(tmp_path, {"a": (F32, (3, 2)), "b": (F32, (3, 2))})
    with pytest.raises(ValueError, match="3 rows are no gate and up"):
        join_gated(list(tensors.values()))


class TestSizes:
    """A net of 2 key heads of 8 and 4 value heads of 6; a mixer of inner size 24, with 3 heads and 2 groups of 5."""

    def test_told_by_the_shapes_beside(self) -> None:
        assert delta_net_sizes(16 * 2 + 24 * 2 + 4 * 2, 24, 4) == (16, 16, 24, 24, 4, 4)
        assert delta_net_convolution_sizes(16 * 2 + 24, 24) == (16, 16, 24)
        assert mamba_sizes(24 * 2 + 10 * 2 + 3, 24, 3) == (24, 24, 10, 10, 3)
        assert mamba_convolution_sizes(24 + 20, 24) == (24, 10, 10)

    @pytest.mark.parametrize(("rows", "values"), [(24, 24), (23, 24), (33, 24)])
    def test_that_leave_no_two_equal_sections(self, rows: int, values: int) -> None:
        with pytest.raises(ValueError, match="no two equal sections"):
            delta_net_convolution_sizes(rows, values)
