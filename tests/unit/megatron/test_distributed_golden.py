"""Distributed checkpoints that the real megatron-core wrote: the catalog holds the whole tensors, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from format_contract import check_format
from unshard.formats.contract import Source
from unshard.formats.megatron.distributed import MegatronDist, MegatronFsdp

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
load_file = pytest.importorskip("safetensors.torch").load_file

from megatron.catalog import assert_holds  # noqa: E402
from megatron.from_hf import llama, moe  # noqa: E402
from megatron.naming import te_name  # noqa: E402

pytestmark = pytest.mark.torch

CASES = (
    "mc_dist_llama_pp2_uneven",
    "mc_dist_llama_pp2vpp2",
    "mc_dist_llama_singleton_tp2",
    "mc_dist_llama_tp2",
    "mc_dist_llama_tp2_perlayer",
    "mc_dist_llama_tp2pp2",
    "mc_dist_llama_tp2pp2_dp2",
    "mc_dist_mixtral_pp2",
    "mc_dist_mlm_llama_tp2pp2_opt",
    "mc_dist_mlm_qwen2_tp2_pad",
    "mc_dist_qwen2_pp2_tied",
    "mc_dist_qwen2_tp2_tied_fp32",
    "mc_dist_qwen3_tp2_verl1",
    "mc_dist_qwen3moe_ep2",
    "mc_dist_qwen3moe_ep2_perlayer",
    "mc_dist_qwen3moe_singleton",
    "mc_dist_qwen3moe_tp2ep2",
    "mc_dist_qwen3moe_tp2etp2",
    "mc_fwd_llama_fp32",
    "mc_fwd_qwen2_fp32",
    "mc_fwd_qwen3_fp32",
    "mc_fwd_qwen3moe_fp32",
)
FILLER_SEED = 5
"""With which the cases' script made the rows of vocabulary padding."""


def place_of(case: Path) -> Path:
    [seal] = case.glob("ckpt/**/metadata.json")
    return seal.parent


def truth(case: Path) -> dict[str, torch.Tensor]:
    """What the catalog must hold: the model's tensors in Megatron's layouts, with the rows of padding.

    A tied head is stored once. The local spec's norms have TransformerEngine's names, also where these fit badly.
    """
    words: list[str] = json.loads((case / "case.json").read_text())["cmd"].split()
    state = load_file(case / "truth" / "model.safetensors")
    config = transformers.AutoConfig.from_pretrained(case / "truth")
    build = moe if "moe" in config.model_type or config.model_type == "mixtral" else llama
    full = build.to_megatron(state, config)
    if "--pad" in words:
        tp = int(words[words.index("--tp") + 1]) if "--tp" in words else 1
        rows = -config.vocab_size % (int(words[words.index("--pad") + 1]) * tp)
        filler = torch.randn(rows, config.hidden_size, generator=torch.Generator().manual_seed(FILLER_SEED))
        for name in full.keys() & {"embedding.word_embeddings.weight", "output_layer.weight"}:
            full[name] = torch.cat([full[name], filler.to(full[name].dtype)])
    named = {te_name(name, full): tensor for name, tensor in full.items()}
    if "--te" in words:
        return named
    return {name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"): t for name, t in named.items()}


@pytest.mark.parametrize("name", CASES)
def test_holds_the_whole_tensors(name: str, larger_golden: Path) -> None:
    case = larger_golden / "cases" / name
    checkpoint = MegatronDist().read(Source(place_of(case)))
    assert checkpoint.dialect == "megatron"
    assert checkpoint.skipped.keys() == {"*._extra_state"} | ({"optimizer"} if name.endswith("_opt") else set())
    assert (checkpoint.config is None) == ("_mlm_" in name)
    assert_holds(checkpoint, truth(case))


def test_no_case_is_forgotten(larger_golden: Path) -> None:
    kinds = ("mc_dist_*", "mc_fwd_*")
    assert {path.name for kind in kinds for path in larger_golden.glob(f"cases/{kind}")} == set(CASES)


def test_facts_and_mesh_of_megatron_lm(larger_golden: Path) -> None:
    place = place_of(larger_golden / "cases" / "mc_dist_mlm_llama_tp2pp2_opt")
    checkpoint = MegatronDist().read(Source(place))
    assert checkpoint.title == "Megatron-Core torch_dist, iteration 10, mesh (tp=2, pp=2)"
    assert (checkpoint.mesh, checkpoint.world_size) == ((("tp", 2), ("pp", 2)), 4)
    assert (checkpoint.facts["num_query_groups"], checkpoint.facts["params_dtype"]) == (2, "bfloat16")


@pytest.mark.parametrize("name", ["mc_dist_llama_tp2pp2_dp2", "mc_dist_qwen3moe_singleton"])
def test_the_contract_of_formats(name: str, larger_golden: Path, tmp_path: Path) -> None:
    check_format(MegatronDist(), place_of(larger_golden / "cases" / name), tmp_path)


def test_directories_of_torch_dcp_are_not_megatrons(larger_golden: Path) -> None:
    others = [path.parent for path in larger_golden.glob("cases/[!m]*/ckpt/**/.metadata")]
    assert len(others) > 10
    assert [path for path in others if MegatronDist().detect(path) or MegatronFsdp().detect(path)] == []
