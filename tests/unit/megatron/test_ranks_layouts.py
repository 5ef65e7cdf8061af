"""Every way of spreading a model over ranks: whole tensors, cut by an independent writer, come back bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from unshard.checkpoint import Checkpoint
from unshard.formats.contract import Source
from unshard.formats.megatron.ranks import MegatronRanks

torch = pytest.importorskip("torch")

from megatron import random_full  # noqa: E402
from megatron.catalog import as_torch, assert_holds  # noqa: E402
from megatron.naming import te_name  # noqa: E402
from megatron.random_full import Draw, State  # noqa: E402
from megatron.writer import write_legacy  # noqa: E402

pytestmark = pytest.mark.torch

ARGS = {
    "hidden_size": random_full.HIDDEN,
    "num_attention_heads": random_full.HEADS,
    "num_query_groups": random_full.GROUPS,
    "kv_channels": random_full.HEAD,
    "swiglu": True,
}


def read(place: Path, **source: Any) -> Checkpoint:
    return MegatronRanks().read(Source(place, **source))


def check(directory: Path, full: State, *, expect: Mapping[str, Any] | None = None, **layout: Any) -> Checkpoint:
    """Write, read and compare; `expect`: further tensors that the catalog must hold."""
    place = write_legacy(directory, full, **{"te": False, "args": ARGS} | layout)
    checkpoint = read(place)
    whole = {te_name(name, full) if layout.get("te") else name: tensor for name, tensor in full.items()}
    assert_holds(checkpoint, whole | dict(expect or {}))
    return checkpoint


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Load a rank's file, change what it holds, and save it again."""
    state = torch.load(file, weights_only=False)
    change(state)
    torch.save(state, file)


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"tp": 4},
        {"pp": 4},
        {"tp": 2, "pp": 2, "te": True},
        {"tp": 2, "pp": 2, "vpp": 2},
        {"pp": 2, "layers": (1, 3)},
        {"pp": 2, "vpp": 2, "layers": (1, 2, 0, 1)},
        {"tp": 2, "args": None},
        {"tp": 2, "pp": 2, "args": None},
    ],
    ids=str,
)
def test_dense(layout: dict[str, Any], tmp_path: Path) -> None:
    if layout.get("layers"):  # uneven stages that no argument tells: counting does
        layout["args"] = ARGS | {"num_layers": None}
    check(tmp_path, random_full.model(4, bias=True), **layout)


def test_a_missing_version_says_nothing_of_megatron_core(tmp_path: Path) -> None:
    """Without `checkpoint_version` Megatron-LM takes 0, whose rows of QKV lie otherwise; megatron-core's never did."""
    full = random_full.model(1)
    place = write_legacy(tmp_path, full, tp=2, te=False, args=ARGS)
    for file in place.glob("*/*"):
        edit(file, lambda state: state.pop("checkpoint_version"))
    assert_holds(read(place), full)


@pytest.mark.parametrize("te", [False, True])
@pytest.mark.parametrize("experts", ["sequential", "te_grouped", "grouped"])
@pytest.mark.parametrize(
    "layout",
    [
        {"ep": 4},
        {"tp": 2},
        {"tp": 2, "etp": 1},
        {"tp": 2, "ep": 2},
        {"tp": 2, "ep": 2, "etp": 1},
        {"tp": 4, "ep": 2, "etp": 2},
        {"tp": 4, "ep": 2, "etp": 1},
        {"pp": 2, "ep": 2},
        {"tp": 2, "pp": 2, "ep": 4, "etp": 1},
    ],
    ids=str,
)
def test_experts(layout: dict[str, Any], experts: str, te: bool, tmp_path: Path) -> None:
    full = random_full.model(2, experts=(1,))
    checkpoint = check(tmp_path, full, te=te, experts=experts, **layout)
    assert checkpoint.tensors["decoder.layers.1.mlp.experts.linear_fc1.weight"].shape == (8, 32, 24)
    sizes = {"tp": layout.get("tp", 1), "pp": layout.get("pp", 1), "ep": layout.get("ep", 1)}
    assert {kind: size for kind, size in checkpoint.mesh if kind != "etp"} == {k: n for k, n in sizes.items() if n > 1}
    assert dict(checkpoint.mesh).get("etp", layout.get("tp", 1)) == layout.get("etp", layout.get("tp", 1))


@pytest.mark.parametrize("te", [False, True])
@pytest.mark.parametrize("layout", [{"tp": 2}, {"ep": 4}, {"tp": 2, "ep": 2, "etp": 1}], ids=str)
def test_biases_of_experts(layout: dict[str, Any], te: bool, tmp_path: Path) -> None:
    full, draw = random_full.model(1, experts=(0,)), Draw(13)
    for expert in range(random_full.EXPERTS):
        module = f"decoder.layers.0.mlp.experts.local_experts.{expert}."
        full |= random_full.mlp(draw, module, random_full.EXPERT_FFN, bias=True)
    checkpoint = check(tmp_path, full, te=te, **layout)
    assert checkpoint.tensors["decoder.layers.0.mlp.experts.linear_fc1.bias"].shape == (8, 32)


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        ({"tp": 2, "ep": 2, "etp": 1}, {}),  # by the directories that exist
        ({"tp": 2, "ep": 2}, {}),  # Megatron's default
        ({"tp": 2, "etp": 1}, {"moe_ffn_hidden_size": random_full.EXPERT_FFN}),  # by the experts' width
        ({"pp": 2}, {}),
        ({"ep": 2}, {}),
    ],
    ids=str,
)
def test_experts_without_args(layout: dict[str, Any], told: dict[str, Any], tmp_path: Path) -> None:
    """A single further number in the names is that of a pipeline or of an expert rank: what they hold tells."""
    full = random_full.model(2, experts=(0, 1))
    sizes = ("tensor", "pipeline", "expert")
    silent = {f"{kind}_model_parallel_size": None for kind in sizes} | {"expert_tensor_parallel_size": None}
    args = silent | {"num_layers": None} | told if told else None
    check(tmp_path, full, args=args, **layout)


@pytest.mark.parametrize("config", [{"moe_intermediate_size": 16, "intermediate_size": 40}, {"intermediate_size": 16}])
@pytest.mark.parametrize("layout", [{"tp": 2, "etp": 1}, {"tp": 4, "etp": 2}, {"tp": 2}, {"tp": 2, "ep": 2, "etp": 1}])
def test_experts_without_args_beside_a_config(layout: dict[str, int], config: dict[str, int], tmp_path: Path) -> None:
    """Which ranks share an expert, where the names of directories do not tell: by the width of experts."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "some_moe", **config}))
    checkpoint = check(tmp_path, random_full.model(2, experts=(0, 1)), args=None, **layout)
    assert dict(checkpoint.mesh).get("etp", layout["tp"]) == layout.get("etp", layout["tp"])


@pytest.mark.parametrize("shape", ["2d", "3d"])
def test_adapters_of_experts(shape: str, tmp_path: Path) -> None:
    """One adapter for all experts of a rank, or one for each: every expert gets its own."""
    full = random_full.model(1, experts=(0,))
    place = write_legacy(tmp_path, full, ep=2, te=False, args=ARGS)
    name = "decoder.layers.0.mlp.experts.linear_fc2.adapter.linear_in.weight"
    draw, given = Draw(7), []
    for rank in range(2):
        file = place / f"mp_rank_00_{rank:03d}" / "model_optim_rng.pt"
        state = torch.load(file, weights_only=False)
        state["model"][name] = draw(4, 3, 16) if shape == "3d" else draw(3, 16)
        given.append(state["model"][name] if shape == "3d" else state["model"][name].expand(4, 3, 16))
        torch.save(state, file)
    checkpoint = read(place)
    assert checkpoint.problems == ()
    assert torch.equal(as_torch(checkpoint.tensors[name], checkpoint.roots), torch.cat(given))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_latent_attention(tp: int, tmp_path: Path) -> None:
    full = random_full.model(1) | random_full.latent_attention(Draw(1), "decoder.layers.1.")
    check(tmp_path, full, tp=tp)


@pytest.mark.parametrize("facts", [{}, {"q_lora_rank": 12, "kv_lora_rank": 20, "qk_pos_emb_head_dim": 2}])
def test_latent_attention_whose_down_projections_are_cut(facts: dict[str, int], tmp_path: Path) -> None:
    """The local spec cuts them by rows; their shapes tell."""
    full = random_full.model(1) | random_full.latent_attention(Draw(1), "decoder.layers.1.")
    dims = {"linear_q_down_proj.weight": 0, "linear_kv_down_proj.weight": 0}
    check(tmp_path, full, tp=2, dims=dims, args=ARGS | facts)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_gated_delta_net(tp: int, tmp_path: Path) -> None:
    full = random_full.model(1) | random_full.delta_net(Draw(1), "decoder.layers.1.")
    check(tmp_path, full, tp=tp)


@pytest.mark.parametrize("tp", [1, 2])
def test_multi_token_prediction(tp: int, tmp_path: Path) -> None:
    """The last stage holds a copy of the embedding beside it: a replica."""
    draw = Draw(2)
    full = random_full.model(2)
    inner = random_full.attention(draw, "mtp.layers.0.transformer_layer.")
    full |= inner | random_full.mlp(draw, "mtp.layers.0.transformer_layer.mlp.", random_full.FFN)
    full |= {f"mtp.layers.0.{norm}.weight": draw(24) for norm in ("enorm", "hnorm", "final_layernorm")}
    full["mtp.layers.0.eh_proj.weight"] = draw(24, 48)
    checkpoint = check(tmp_path, full, tp=tp, pp=2)
    assert len(checkpoint.tensors["embedding.word_embeddings.weight"].chunks) == 2 * tp


def test_tied_copy_of_the_last_stage_stays(tmp_path: Path) -> None:
    full = random_full.model(2, tied=True)
    check(tmp_path, full, tp=2, pp=2, expect={"output_layer.weight": full["embedding.word_embeddings.weight"]})


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("args", [ARGS, None])
def test_value_head_is_replicated(pp: int, args: dict[str, Any] | None, tmp_path: Path) -> None:
    full = random_full.model(2) | {"output_layer.weight": Draw(3)(1, 24)}
    check(tmp_path, full, tp=2, pp=pp, args=args)


def test_attention_sinks_and_plain_mlps(tmp_path: Path) -> None:
    draw = Draw(4)
    full = random_full.model(1) | {"decoder.layers.0.self_attention.core_attention.softmax_offset": draw(8)}
    full |= random_full.mlp(draw, "decoder.layers.0.mlp.", random_full.FFN, bias=True, gated=False)
    check(tmp_path, full, tp=2, args=ARGS | {"swiglu": False})


def test_groups_that_ranks_do_not_divide(tmp_path: Path) -> None:
    """With fewer groups than ranks the rows are cut evenly, through the middle of groups."""
    full = random_full.model(1) | random_full.attention(Draw(5), "decoder.layers.0.", groups=2)
    check(tmp_path, full, tp=4, args=ARGS | {"num_query_groups": 2})


def test_norms_of_the_whole_projection(tmp_path: Path) -> None:
    draw = Draw(6)
    norms = {"q": draw(random_full.HEADS * random_full.HEAD), "k": draw(random_full.GROUPS * random_full.HEAD)}
    full = random_full.model(1)
    full |= {f"decoder.layers.0.self_attention.{which}_layernorm.weight": norm for which, norm in norms.items()}
    check(tmp_path / "replicated", full, tp=2)
    check(tmp_path / "cut", full, tp=2, dims={"q_layernorm.weight": 0, "k_layernorm.weight": 0})


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("alone", [False, True])
def test_adapters(tp: int, alone: bool, tmp_path: Path) -> None:
    """An adapter of a gated MLP has its sections, told by the base, or by the adapter of the second layer."""
    full = random_full.model(2)
    if not alone:
        full |= random_full.adapters(Draw(8), "decoder.layers.0.") | random_full.adapters(Draw(9), "decoder.layers.1.")
        check(tmp_path, full, tp=tp, pp=2)
        return
    full |= random_full.adapters(Draw(8), "decoder.layers.0.")
    place = write_legacy(tmp_path, full, tp=tp, te=False, args=None)
    for file in place.glob("*/*"):
        edit(file, lambda state: state.update(model={n: t for n, t in state["model"].items() if ".adapter." in n}))
    assert_holds(read(place), {name: tensor for name, tensor in full.items() if ".adapter." in name})


@pytest.mark.parametrize("pp", [1, 2])
def test_vision_tower_of_megatron(pp: int, tmp_path: Path) -> None:
    """It is cut as the language model is; its layers all lie on the first stage."""
    draw = Draw(10)
    full = {f"language_model.{name}": tensor for name, tensor in random_full.model(2).items()}
    full |= {"vision_model.patch_embed.proj.weight": draw(24, 3, 2, 2)}
    full |= random_full.mlp(draw, "vision_model.merger.", 32, bias=True, gated=False)
    for layer in range(2):
        full |= random_full.attention(draw, f"vision_model.decoder.layers.{layer}.")
        full |= random_full.mlp(draw, f"vision_model.decoder.layers.{layer}.mlp.", 40)
    check(tmp_path, full, tp=2, pp=pp)


def test_vision_tower_of_transformers(tmp_path: Path) -> None:
    """It lies whole on each rank, under names that Megatron's own would cut."""
    draw = Draw(10)
    full = {f"language_model.{name}": tensor for name, tensor in random_full.model(2).items()}
    tower = {"vision_model.blocks.0.attn.qkv.weight": draw(72, 24), "vision_model.blocks.0.mlp.fc1.bias": draw(40)}
    tower |= random_full.mlp(draw, "vision_model.merger.", 32, bias=True, gated=False)
    place = write_legacy(tmp_path, full, tp=2, pp=2, te=False, args=ARGS)
    for file in place.glob("mp_rank_*_000/*"):
        edit(file, lambda state: state["model"].update(tower))
    assert_holds(read(place), full | tower)


def test_names_that_no_table_knows(tmp_path: Path) -> None:
    """All are listed at once; the user's axes say how they lie; on one rank nothing need be said."""
    draw = Draw(11)
    new = {"decoder.layers.0.a.scale": draw(8, 3), "decoder.layers.1.a.scale": draw(8, 3), "decoder.temper": draw(5)}
    full = random_full.model(2) | new
    place = write_legacy(tmp_path / "two", full, tp=2, te=False, args=ARGS, dims={".a.scale": 0})
    (problem,) = read(place).problems
    assert all(name in problem.message for name in new)
    assert problem.hint is not None
    assert "--map" in problem.hint
    axes = {r"decoder\.layers\.\d+\.a\.scale": 0, r"decoder\.temper": None}
    assert_holds(read(place, axes=axes), full)
    check(tmp_path / "one", full)


def test_replicas_carry_the_ranks_that_hold_them(tmp_path: Path) -> None:
    full = random_full.model(1, experts=(0,))
    checkpoint = check(tmp_path, full, tp=2, ep=2)
    router = checkpoint.tensors["decoder.layers.0.mlp.router.weight"]
    assert sorted(chunk.rank or 0 for chunk in router.chunks) == [0, 1, 2, 3]
    assert len({chunk.box for chunk in router.chunks}) == 1
    qkv = checkpoint.tensors["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert len(qkv.chunks) == 4
    assert len({chunk.box for chunk in qkv.chunks}) == 2


def test_all_kinds_of_values_survive(tmp_path: Path) -> None:
    full = random_full.model(1, experts=(0,), draw=Draw(12, torch.bfloat16))
    full["decoder.final_layernorm.weight"] = torch.tensor([float("nan"), float("inf"), -0.0] * 8, dtype=torch.bfloat16)
    checkpoint = check(tmp_path, full, tp=2, ep=2)
    assert str(checkpoint.tensors["decoder.layers.0.mlp.router.expert_bias"].dtype) == "F32"


class TestVerlsFirstLayout:
    @pytest.fixture
    def full(self) -> State:
        return random_full.model(4)

    @pytest.mark.parametrize("already_global", [False, True])
    @pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (2, 2)])
    def test_a_list_of_virtual_stages(
        self, full: State, pp: int, vpp: int, already_global: bool, tmp_path: Path
    ) -> None:
        """`actor/model/mp_rank_TT[_PPP]/model.pt`, with layers numbered by stage, or over all of them."""
        place = write_legacy(
            tmp_path / "actor" / "model", full, tp=2, pp=pp, vpp=vpp, args=None, te=False, iteration=None
        )
        for file in place.glob("*/model_optim_rng.pt"):
            state = torch.load(file, weights_only=False)
            models = [state["model"]] if vpp == 1 else [state[f"model{number}"] for number in range(vpp)]
            if already_global:
                rank = int(file.parent.name.split("_")[3]) if pp > 1 else 0
                models = [renumber(model, (v * pp + rank) * (4 // (pp * vpp))) for v, model in enumerate(models)]
            torch.save(models, file.with_name("model.pt"))
            file.unlink()
        checkpoint = read(place)
        assert_holds(checkpoint, full)
        assert MegatronRanks().detect(place) == f"{2 * pp} Megatron ranks"
        assert any("no `args`" in note.text for note in checkpoint.notes)

    def test_the_number_after_the_tensor_rank_is_a_pipeline_rank(self, tmp_path: Path) -> None:
        full = random_full.model(2, experts=(0, 1))
        check(tmp_path, full, pp=2, args=None, iteration=None)


def renumber(model: State, first: int) -> State:
    return {
        ".".join([*name.split(".")[:2], str(int(name.split(".")[2]) + first), *name.split(".")[3:]])
        if name.startswith("decoder.layers.")
        else name: tensor
        for name, tensor in model.items()
    }


class TestPlaces:
    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        return write_legacy(tmp_path, random_full.model(2), tp=2, pp=2, te=False, args=ARGS)

    def test_one_rank_stands_for_all(self, place: Path) -> None:
        whole = read(place)
        for part in (place / "mp_rank_01_000", place / "mp_rank_00_001" / "model_optim_rng.pt"):
            assert MegatronRanks().detect(part) == "one of 4 Megatron ranks"
            checkpoint = read(part)
            assert checkpoint.tensors == whole.tensors
            assert checkpoint.roots == whole.roots
            assert any("all were read" in note.text for note in checkpoint.notes)

    def test_a_lone_file_in_no_rank_directory(self, tmp_path: Path) -> None:
        full = random_full.model(1)
        place = write_legacy(tmp_path / "run", full, te=False, args=ARGS)
        lone = tmp_path / "model_optim_rng.pt"
        (place / "mp_rank_00" / "model_optim_rng.pt").rename(lone)
        assert MegatronRanks().detect(lone) == "1 Megatron rank"
        assert_holds(read(lone), full)

    def test_directories_on_several_machines(self, place: Path, tmp_path: Path) -> None:
        whole = read(place)
        other = tmp_path / "node1"
        for name in ("mp_rank_01_000", "mp_rank_01_001"):
            (other / name).parent.mkdir(exist_ok=True)
            (place / name).rename(other / name)
        checkpoint = read(place, also=(other,))
        assert checkpoint.problems == ()
        assert sorted(checkpoint.tensors) == sorted(whole.tensors)
        assert checkpoint.roots["also1"] == other

    def test_the_distributed_optimizer_of_old_versions_lies_apart(self, tmp_path: Path) -> None:
        """`model_rng.pt` in `mp_rank_00`, and per data-parallel rank `mp_rank_00_000/optim.pt`."""
        full = random_full.model(1)
        place = write_legacy(tmp_path, full, tp=2, te=False, args=ARGS, file_name="model_rng.pt")
        for number in range(3):
            (place / f"mp_rank_00_{number:03d}").mkdir()
            torch.save({"optimizer": {}}, place / f"mp_rank_00_{number:03d}" / "optim.pt")
        torch.save({}, place / "mp_rank_00" / "distrib_optim.pt")
        assert MegatronRanks().detect(place) == "2 Megatron ranks"
        assert_holds(read(place), full)

    def test_what_lies_beside_the_model_is_counted(self, tmp_path: Path) -> None:
        beside = {"optimizer": {"state": torch.zeros(3)}, "rng_state": [torch.zeros(2)], "tokens": 7}
        place = write_legacy(tmp_path, random_full.model(1), tp=2, args=ARGS, beside=beside)
        skipped = read(place).skipped
        assert skipped["optimizer"] == "state of the optimizer (2 entries)"
        assert skipped["rng_state"] == "states of random generators (2 entries)"
        assert skipped["tokens"] == "lies beside the model (2 entries)"
        assert "10 entries" in skipped["*._extra_state"]

    def test_wrappers_around_the_model(self, tmp_path: Path) -> None:
        full = random_full.model(1)
        wrap = lambda held: {f"module.module.{name}": tensor for name, tensor in held.items()}  # noqa: E731
        check(tmp_path, full, tp=2, arrange=wrap)

    def test_facts_of_the_args(self, place: Path) -> None:
        checkpoint = read(place)
        assert checkpoint.facts["tensor_model_parallel_size"] == 2
        assert checkpoint.facts["kv_channels"] == random_full.HEAD
