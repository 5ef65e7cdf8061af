"""Checkpoints from before megatron-core: nested key trees, and rows of QKV in the order of their version."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from unshard.checkpoint import Checkpoint
from unshard.dtypes import F32
from unshard.errors import FormatError
from unshard.formats.contract import Source
from unshard.formats.megatron.ranks import MegatronRanks
from unshard.formats.megatron.ranks.pre_core import core_name, is_pre_core, to_core
from unshard.tensors import Tensor

torch = pytest.importorskip("torch")

from megatron import random_full  # noqa: E402
from megatron.catalog import assert_holds  # noqa: E402
from megatron.random_full import Draw, State  # noqa: E402
from megatron.writer import write_legacy  # noqa: E402

pytestmark = pytest.mark.torch

ARGS = {"num_attention_heads": random_full.HEADS, "kv_channels": random_full.HEAD, "swiglu": False}


def read(place: Path) -> Checkpoint:
    return MegatronRanks().read(Source(place))


def model(*, tied: bool) -> State:
    """GPT of the old kind: biases everywhere, learned positions, no grouped queries, no q/k norms."""
    draw = Draw(3)
    full = random_full.model(2, bias=True, tied=tied)
    full["embedding.position_embeddings.weight"] = draw(11, random_full.HIDDEN)
    for layer in range(2):
        full |= random_full.attention(draw, f"decoder.layers.{layer}.", bias=True, groups=random_full.HEADS)
        full |= random_full.mlp(draw, f"decoder.layers.{layer}.mlp.", random_full.FFN, bias=True, gated=False)
    full |= {name.replace("weight", "bias"): draw(*tensor.shape) for name, tensor in full.items() if "norm" in name}
    return {name: tensor for name, tensor in full.items() if not re.search(r"[qk]_layernorm", name)}


def tree(held: State, *, transformer: str, attention: str, norms: str) -> dict[str, Any]:
    """The nested dicts of a stage, as `state_dict_for_save_checkpoint` of `language_model.py` made them."""
    embedding: dict[str, Any] = {}
    layers: State = {}
    model: dict[str, Any] = {"language_model": {}}
    has_embedding = any(name.startswith("embedding.") for name in held)
    for name, tensor in held.items():
        if name.startswith("embedding."):
            kind, _, rest = name.removeprefix("embedding.").partition(".")
            embedding.setdefault(kind, {})[rest] = tensor
        elif name == "output_layer.weight":
            if has_embedding or "untied" in norms:
                model["language_model"]["output_layer"] = {"weight": tensor}
            else:
                model["word_embeddings_for_head"] = {"weight": tensor}
        else:
            name = name.removeprefix("decoder.")
            for core, old in (
                ("self_attention.linear_qkv", f"{attention}.query_key_value"),
                ("self_attention.linear_proj", f"{attention}.dense"),
                ("mlp.linear_fc1", "mlp.dense_h_to_4h"),
                ("mlp.linear_fc2", "mlp.dense_4h_to_h"),
                ("pre_mlp_layernorm", f"post_attention_{norms}"),
                ("input_layernorm", f"input_{norms}"),
                ("final_layernorm", f"final_{norms}"),
            ):
                name = name.replace(core, old)
            layers[name] = tensor
    if embedding:
        model["language_model"]["embedding"] = embedding
    model["language_model"][transformer] = layers
    return model


AGES = {
    "v1.0": {"transformer": "transformer", "attention": "attention", "norms": "layernorm"},
    "v2.5": {"transformer": "encoder", "attention": "self_attention", "norms": "layernorm"},
    "core_v0.8": {"transformer": "encoder", "attention": "self_attention", "norms": "norm"},
}


@pytest.mark.parametrize("age", AGES)
@pytest.mark.parametrize("version", [None, 0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2)])
def test_becomes_what_megatron_core_would_hold(
    age: str, version: float | None, tp: int, pp: int, tmp_path: Path
) -> None:
    full = model(tied=True)
    arrange = lambda held: tree(held, **AGES[age])  # noqa: E731
    place = write_legacy(
        tmp_path,
        full,
        tp=tp,
        pp=pp,
        te=False,
        extra_state=False,
        args=ARGS,
        checkpoint_version=version,
        arrange=arrange,
    )
    head = {"output_layer.weight": full["embedding.word_embeddings.weight"]} if pp > 1 else {}
    assert_holds(read(place), full | head)


def test_an_untied_head_lies_in_the_tree(tmp_path: Path) -> None:
    full = model(tied=False)
    arrange = lambda held: tree(held, **AGES["v2.5"])  # noqa: E731
    place = write_legacy(tmp_path, full, tp=2, te=False, extra_state=False, args=ARGS, arrange=arrange)
    assert_holds(read(place), full)


def test_a_stage_of_its_own_for_the_embedding(tmp_path: Path) -> None:
    """`--standalone-embedding-stage`: the first pipeline rank has no layers by which its names could be told."""
    full = model(tied=False)
    arrange = lambda held: tree(held, **AGES["v2.5"])  # noqa: E731
    args = ARGS | {"standalone_embedding_stage": True}
    place = write_legacy(tmp_path, full, pp=1, te=False, extra_state=False, args=args, arrange=arrange)
    whole = place / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(whole, weights_only=False)
    state["args"].pipeline_model_parallel_size = 2
    language_model = state["model"]["language_model"]
    stages = {"embedding": language_model.pop("embedding")}, language_model
    for number, stage in enumerate(stages):
        directory = place / f"mp_rank_00_{number:03d}"
        directory.mkdir()
        torch.save({**state, "model": {"language_model": stage}}, directory / whole.name)
    whole.unlink()
    whole.parent.rmdir()
    assert_holds(read(place), full)


def test_heads_must_be_known_where_rows_are_in_their_order(tmp_path: Path) -> None:
    arrange = lambda held: tree(held, **AGES["v1.0"])  # noqa: E731
    place = write_legacy(
        tmp_path, model(tied=True), te=False, extra_state=False, args=ARGS, checkpoint_version=1.0, arrange=arrange
    )
    file = place / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    del state["args"]
    torch.save(state, file)
    (problem,) = read(place).problems
    assert "checkpoint_version 1 keeps the rows of QKV by heads" in problem.message
    state["checkpoint_version"] = 2.0
    torch.save(state, file)
    assert read(place).problems == ()


def test_a_version_that_never_was(tmp_path: Path) -> None:
    arrange = lambda held: tree(held, **AGES["v1.0"])  # noqa: E731
    place = write_legacy(
        tmp_path, model(tied=True), te=False, extra_state=False, args=ARGS, checkpoint_version=1.5, arrange=arrange
    )
    (problem,) = read(place).problems
    assert "checkpoint_version 1.5" in problem.message


def test_another_project_with_the_same_names_is_refused(tmp_path: Path) -> None:
    """EPFL's Megatron-LLM keeps [up; gate] and interleaved heads under Megatron-LM's names."""
    arrange = lambda held: tree(held, **AGES["v2.5"])  # noqa: E731
    args = ARGS | {"tie_embed_logits": True}
    place = write_legacy(tmp_path, model(tied=True), te=False, extra_state=False, args=args, arrange=arrange)
    (problem,) = read(place).problems
    assert "Megatron-LLM" in problem.message


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("language_model.encoder.layers.7.mlp.local_experts.3.dense_h_to_4h.weight",
         "decoder.layers.7.mlp.experts.local_experts.3.linear_fc1.weight"),
        ("language_model.encoder.layers.7.mlp.router.weight", "decoder.layers.7.mlp.router.weight"),
        ("language_model.word_embeddings.weight", "embedding.word_embeddings.weight"),
        ("lm_head.weight", "output_layer.weight"),
    ],
)  # fmt: skip
def test_names(old: str, new: str) -> None:
    assert core_name(old) == new


def test_a_language_model_beside_a_vision_tower_is_not_old() -> None:
    assert not is_pre_core(["language_model.decoder.layers.0.self_attention.linear_qkv.weight", "vision_model.conv1"])
    assert is_pre_core(["language_model.transformer.layers.0.attention.dense.weight"])


def test_rows_of_a_scalar_cannot_be_told_apart() -> None:
    name = "language_model.encoder.layers.0.self_attention.query_key_value.weight"
    with pytest.raises(FormatError, match="has 0 rows per rank"):
        to_core({name: Tensor(name, F32, (), ())}, 0.0, {"num_attention_heads": 1}, 1)
