"""Directories of ranks that no training wrote: the answer is a catalog with problems, or an error for people."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unshard.checkpoint import Checkpoint
from unshard.errors import FormatError, UnshardError
from unshard.formats.contract import Source
from unshard.formats.megatron.ranks import MegatronRanks
from unshard.tensors import Tensor

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch

LAYER = "decoder.layers.0."
NAMES = (
    "embedding.word_embeddings.weight",
    "output_layer.weight",
    f"{LAYER}self_attention.linear_qkv.weight",
    f"{LAYER}self_attention.linear_proj.weight",
    f"{LAYER}self_attention.q_layernorm.weight",
    f"{LAYER}self_attention.linear_q_down_proj.weight",
    f"{LAYER}self_attention.linear_q_up_proj.weight",
    f"{LAYER}self_attention.linear_kv_down_proj.weight",
    f"{LAYER}self_attention.in_proj.weight",
    f"{LAYER}self_attention.conv1d.weight",
    f"{LAYER}self_attention.A_log",
    f"{LAYER}self_attention.out_proj.weight",
    f"{LAYER}mlp.linear_fc1.weight",
    f"{LAYER}mlp.linear_fc2.weight",
    f"{LAYER}mlp.linear_fc1.adapter.linear_out.weight",
    f"{LAYER}mlp.router.weight",
    f"{LAYER}mlp.experts.weight1",
    f"{LAYER}mlp.experts.weight2",
    f"{LAYER}mlp.experts.linear_fc1.weight",
    f"{LAYER}mlp.experts.linear_fc1.weight7",
    f"{LAYER}mlp.experts.linear_fc2.weight0",
    f"{LAYER}mlp.experts.local_experts.3.linear_fc2.bias",
    f"{LAYER}mlp.experts.linear_fc2.adapter.linear_in.weight",
    f"{LAYER}mlp.experts.strange",
    "decoder.layers.99.x",
    "language_model.encoder.layers.0.self_attention.query_key_value.weight",
    "language_model.transformer.layers.1.attention.dense.weight",
)
FACTS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_layers",
    "num_experts",
    "num_attention_heads",
    "moe_ffn_hidden_size",
    "kv_lora_rank",
    "kv_channels",
    "hidden_size",
    "decoder_first_pipeline_num_layers",
    "pipeline_model_parallel_layout",
    "account_for_loss_in_pipeline_split",
)
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 4, 8]), max_size=3)
VALUES = st.one_of(
    st.integers(-2, 9), st.sampled_from([10**6, 10**30, None, True, "Et|tL", "t*999999999", 1.5, [["decoder"]]])
)


def read(place: Path) -> Checkpoint:
    return MegatronRanks().read(Source(place))


@settings(max_examples=60)
@given(
    directories=st.lists(
        st.sampled_from(["00", "01", "03", "00_000", "00_001", "01_001", "00_001_001"]), min_size=1, max_size=3
    ),
    models=st.lists(st.dictionaries(st.sampled_from(NAMES), SHAPES, max_size=6), min_size=1, max_size=3),
    facts=st.dictionaries(st.sampled_from(FACTS), VALUES, max_size=6),
    version=st.sampled_from([None, 0, 1.0, 3.0, "3", float("nan")]),
)
def test_no_model_brings_down_the_reader(
    directories: list[str],
    models: list[dict[str, list[int]]],
    facts: dict[str, Any],
    version: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    place = tmp_path_factory.mktemp("ranks")
    for number, name in enumerate(dict.fromkeys(directories)):
        model = {key: torch.zeros(shape) for key, shape in models[number % len(models)].items()}
        state = {"args": argparse.Namespace(**facts), "model": model}
        state |= {} if version is None else {"checkpoint_version": version}
        (place / f"mp_rank_{name}").mkdir()
        torch.save(state, place / f"mp_rank_{name}" / "model_optim_rng.pt")
    tensors: Mapping[str, Tensor] = {}
    with contextlib.suppress(UnshardError):
        tensors = read(place).tensors
    for name, tensor in tensors.items():
        assert tensor.name == name
        assert all(chunk.box.fits(tensor.grid) for chunk in tensor.chunks)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("mp_rank_99999_99999_99999", {}),
        ("mp_rank_00", {"tensor_model_parallel_size": 10**9}),
        ("mp_rank_00", {"pipeline_model_parallel_size": 10**18, "num_layers": 10**18}),
        ("mp_rank_00", {"expert_model_parallel_size": 10**6, "expert_tensor_parallel_size": 10**6}),
    ],
)
def test_ranks_without_number(name: str, args: dict[str, int], tmp_path: Path) -> None:
    """Numbers that a name or an argument can claim at no cost must cost us none."""
    (tmp_path / name).mkdir()
    model = {f"{LAYER}mlp.experts.linear_fc2.weight0": torch.zeros(2, 2)}
    torch.save({"args": argparse.Namespace(**args), "model": model}, tmp_path / name / "model_optim_rng.pt")
    start = time.process_time()
    with pytest.raises(FormatError, match="more than any cluster has"):
        read(tmp_path)
    assert time.process_time() - start < 2


def test_experts_without_number(tmp_path: Path) -> None:
    """A router of many rows is cheap, where its tensor repeats one of them."""
    model = {
        f"{LAYER}mlp.router.weight": torch.zeros(1, 2).expand(10**12, 2),
        f"{LAYER}mlp.experts.linear_fc1.adapter.linear_in.weight": torch.zeros(2, 2),
    }
    (tmp_path / "mp_rank_00").mkdir()
    torch.save({"model": model}, tmp_path / "mp_rank_00" / "model_optim_rng.pt")
    (problem,) = read(tmp_path).problems
    assert "how many experts" in problem.message


def test_dicts_in_dicts_without_end(tmp_path: Path) -> None:
    nested: dict[str, Any] = {"weight": torch.zeros(2)}
    for _ in range(200):
        nested = {"a": nested}
    loop: dict[str, Any] = {"weight": torch.zeros(2)}
    loop["again"] = loop
    (tmp_path / "mp_rank_00").mkdir()
    torch.save({"model": {"nested": nested, "loop": loop}}, tmp_path / "mp_rank_00" / "model_optim_rng.pt")
    checkpoint = read(tmp_path)
    assert "loop.weight" in checkpoint.tensors
    assert "a dict of 1 entries" in checkpoint.skipped["nested" + ".a" * 15]
