"""Directories of ranks that the real megatron-core wrote: the catalog holds the whole tensors, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from format_contract import check_format
from unshard.formats.contract import Source
from unshard.formats.megatron.ranks import MegatronRanks

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
load_file = pytest.importorskip("safetensors.torch").load_file

from megatron.catalog import assert_holds  # noqa: E402
from megatron.from_hf import llama, moe  # noqa: E402
from megatron.naming import te_name  # noqa: E402

pytestmark = pytest.mark.torch

CASES = (
    "llama_pp2vpp2",
    "llama_tp2_local_opt",
    "llama_tp2pp2",
    "mixtral_tp2ep2etp2",
    "mixtral_tp2pp2ep2",
    "qwen2_pp2_tied",
    "qwen2_tp2_tied_pad",
    "qwen2_tp4_fp16",
    "qwen3_tp2pp4",
    "qwen3moe_ep2",
    "qwen3moe_tp2ep2_local",
    "qwen3moe_tp2etp2",
)
FILLER_SEED = 5
"""With which the cases' script made the rows of vocabulary padding."""


def command(case: Path) -> list[str]:
    """The words with which the case was made."""
    words: list[str] = json.loads((case / "case.json").read_text())["cmd"].split()
    return words


def option(case: Path, name: str, default: int = 1) -> int:
    words = command(case)
    return int(words[words.index(name) + 1]) if name in words else default


def truth(case: Path) -> dict[str, torch.Tensor]:
    """What the catalog must hold: the model's tensors in Megatron's layouts, with padding and tied copies."""
    state = load_file(case / "truth" / "model.safetensors")
    config = transformers.AutoConfig.from_pretrained(case / "truth")
    build = moe if "moe" in config.model_type or config.model_type == "mixtral" else llama
    full = build.to_megatron(state, config)
    if padding := option(case, "--pad", 0):
        multiple = padding * option(case, "--tp")
        rows = -config.vocab_size % multiple
        filler = torch.randn(rows, config.hidden_size, generator=torch.Generator().manual_seed(FILLER_SEED))
        for name in [name for name in full if name in ("embedding.word_embeddings.weight", "output_layer.weight")]:
            full[name] = torch.cat([full[name], filler.to(full[name].dtype)])
    if option(case, "--pp") > 1:
        full.setdefault("output_layer.weight", full["embedding.word_embeddings.weight"])
    return {te_name(name, full) if "--te" in command(case) else name: tensor for name, tensor in full.items()}


@pytest.mark.parametrize("name", CASES)
def test_holds_the_whole_tensors(name: str, larger_golden: Path) -> None:
    case = larger_golden / "cases" / f"mc_leg_{name}"
    checkpoint = MegatronRanks().read(Source(case / "ckpt" / "iter_0000010"))
    assert checkpoint.dialect == "megatron"
    assert checkpoint.facts["num_layers"] == transformers.AutoConfig.from_pretrained(case / "truth").num_hidden_layers
    assert_holds(checkpoint, truth(case))
    sizes = {kind: option(case, f"--{kind}") for kind in ("tp", "pp", "vpp", "ep")}
    assert {kind: size for kind, size in checkpoint.mesh if kind != "etp"} == {k: n for k, n in sizes.items() if n > 1}


def test_no_case_is_forgotten(larger_golden: Path) -> None:
    assert {path.name for path in larger_golden.glob("cases/mc_leg_*")} == {f"mc_leg_{name}" for name in CASES}


@pytest.mark.parametrize("name", ["llama_tp2pp2", "mixtral_tp2pp2ep2"])
def test_the_contract_of_formats(name: str, larger_golden: Path, tmp_path: Path) -> None:
    check_format(MegatronRanks(), larger_golden / "cases" / f"mc_leg_{name}" / "ckpt" / "iter_0000010", tmp_path)
