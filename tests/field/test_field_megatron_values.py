"""Faults from the field in what comes out of Megatron's checkpoints: order of rows, experts, padding, names, heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from field_cases import merge, refuse, same, truth, warnings, words

import unshard
from commands import run
from fsdp_bytes import Array, write_json
from golden.tensor_files import read_tensors
from golden_set import COMMITTED
from megatron_bytes import FILE, Decoder, Weights, shard, write_legacy, write_rank
from unshard.dtypes import F32
from unshard.errors import ModelError, UsageError
from unshard.families import FAMILIES
from unshard.families.architecture import read_architecture
from unshard.families.rules import join, split
from unshard.families.sizes import Sizes
from unshard.tensors import Tensor


def test_number_of_an_expert_stands_where_it_belongs(tmp_path: Path) -> None:
    """verl#2319, verl#2024: `mlp.experts.gate_proj.weight100` in a file that was far too small, without an error."""
    model = Decoder(layers=1, experts=24)
    source = write_legacy(tmp_path / "run", model, tp=2, ep=2)
    report, found = merge(source, tmp_path / "out")
    assert same(found, model.weights())
    assert "model.layers.0.mlp.experts.13.gate_proj.weight" in found
    assert report.parameters == sum(array.size for array in model.weights().values())


def test_expert_that_no_rank_holds_is_never_left_out(tmp_path: Path) -> None:
    """Megatron-LM#5844: expert weights that matched nothing stayed uninitialised, and the save reported success."""
    model = Decoder(experts=4)
    full = model.megatron()
    for part in ("linear_fc1", "linear_fc2"):
        del full[f"decoder.layers.1.mlp.experts.{part}.weight3"]
    message = refuse(write_legacy(tmp_path / "run", model, ep=2, full=full), tmp_path / "out").message
    assert "expert 3 missing" in message
    assert "decoder.layers.1.mlp.experts.linear_fc1.weight" in message


@pytest.mark.torch
@pytest.mark.parametrize("tower", ["keep_tower", "rebuild_tower"])
def test_vision_towers_of_megatron_are_known(tower: str, tmp_path: Path) -> None:
    """verl#4498, PR#4701: `vision_model.*` was rejected: names had to begin with decoder, embedding or output_layer."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file

    from megatron.from_hf import llama, qwen_vl
    from megatron.writer import write_legacy as write_torch

    case = COMMITTED / "fsdp2_qwen2_5_vl" / "truth"
    config = transformers.AutoConfig.from_pretrained(case)
    state = {_of_transformers_5(name): value for name, value in load_file(case / "model.safetensors").items()}
    full = qwen_vl.text_to_megatron(state, config, llama.to_megatron)
    full |= qwen_vl.keep_tower(state) if tower == "keep_tower" else qwen_vl.rebuild_tower(state, config)
    write_torch(tmp_path / "run", full)
    assert merge(tmp_path / "run", tmp_path / "out", config=case)[1] == truth("fsdp2_qwen2_5_vl")


def _of_transformers_5(name: str) -> str:
    """The name in the running model of a name in the file, of which the scripts speak."""
    if name.startswith("visual."):
        return f"model.{name}"
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def test_flags_of_verl_against_the_config_are_refused(tmp_path: Path) -> None:
    """verl#4370: `--tie-word-embedding` of a model that is not tied; the merge went on until it broke."""
    source = write_legacy(tmp_path / "run", Decoder(), tp=2)
    line = ("merge", "--backend", "megatron", "--local_dir", source, "--target_dir", tmp_path / "out")
    assert run(*line, "--tie-word-embedding").code == ModelError.exit_code
    heads = run(*line, "--num-attention-heads", "32", "--num-key-value-heads", "8")
    assert heads.code == UsageError.exit_code
    assert "--num-attention-heads 32" in heads.stderr
    assert "--num-key-value-heads 8" in heads.stderr
    assert not (tmp_path / "out").exists()
    assert run(*line, "--num-attention-heads", "4", "--num-key-value-heads", "2").code == 0


@pytest.mark.parametrize("recorded", [True, False])
def test_heads_are_said_where_nothing_tells_them(recorded: bool, tmp_path: Path) -> None:
    """verl#4370: the flags are for checkpoints whose config.json has no numbers of heads."""
    model = Decoder(groups=4)
    source = write_legacy(tmp_path / "run", model, tp=2, recorded=recorded)
    config = model.config()
    del config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    write_json(source / "hf" / "config.json", config)
    assert "--num-attention-heads" in str(refuse(source, tmp_path / "no").hint)
    found = merge(source, tmp_path / "out", attention_heads=4, key_value_heads=4)[1]
    assert same(found, model.weights())
    wrong = refuse(source, tmp_path / "wrong", attention_heads=4, key_value_heads=2)
    assert isinstance(wrong, UsageError if recorded else ModelError)


def test_every_file_of_a_sharded_model_is_written(tmp_path: Path) -> None:
    """verl#4338: of several weights files, only one was there."""
    source = write_legacy(tmp_path / "run", Decoder(), tp=2, pp=2)
    found = merge(source, tmp_path / "out", max_shard_size=4000)[1]
    assert same(found, Decoder().weights())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2
    assert files == {file.name for file in (tmp_path / "out").glob("*.safetensors")}
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in Decoder().weights().values())


def test_training_without_mtp_loses_nothing_else(tmp_path: Path) -> None:
    """verl#6064, AReaL#1403: with MTP off, `lm_head` and two layers were lost, too: 62 GB of 67, without an error."""
    model = Decoder(bias=True)
    source = write_legacy(tmp_path / "run", model, pp=2)
    mimo = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    write_json(source / "hf" / "config.json", model.config(**mimo))
    report, found = merge(source, tmp_path / "out")
    assert same(found, model.weights())
    assert "MTP" in warnings(report)
    full = model.megatron()
    del full["output_layer.weight"]
    headless = write_legacy(tmp_path / "headless", model, full=full)
    write_json(headless / "hf" / "config.json", model.config(**mimo))
    assert "lm_head.weight" in refuse(headless, tmp_path / "no").message


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_number_of_ranks_changes_no_bit(ranks: int, tmp_path: Path) -> None:
    """ROCm/Megatron-LM#63, Megatron-LM#703, #706: gate and up read as `[0, 2, 4, …, 1, 3, 5, …]`; TP 2 and 4 wrong."""
    model = Decoder(heads=8, groups=4, ffn=24, vocabulary=40)
    report, found = merge(write_legacy(tmp_path / "run", model, tp=ranks), tmp_path / "out")
    assert same(found, model.weights())
    assert report.rounded == ()


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_queries_keys_and_values_are_grouped(groups: int, bias: bool, ranks: int, tmp_path: Path) -> None:
    """NeMo-RL#2802, Pai-Megatron-Patch#204, ChatLearn#277: `cat([q, k, v])` against query groups; fewer groups than TP.

    With fewer groups than ranks, a rank's rows begin and end within a group.
    """
    model = Decoder(layers=1, heads=8, groups=groups, head=4, vocabulary=40, bias=bias)
    assert same(merge(write_legacy(tmp_path / "run", model, tp=ranks), tmp_path / "out")[1], model.weights())


def test_experts_on_every_tensor_rank_are_taken_once(tmp_path: Path) -> None:
    """Pai-Megatron-Patch#495: with ETP 1 the experts lay on the disk once per TP rank, "~1.3T x TP"."""
    case = COMMITTED / "megatron_dist_tp2ep2etp1"
    found = merge(case / "ckpt", tmp_path / "dist", config=case / "hf")[1]
    assert found == read_tensors(case / "truth")
    model = Decoder(experts=4)
    source = write_legacy(tmp_path / "run", model, tp=2)
    args = model.args(tensor_model_parallel_size=2, expert_tensor_parallel_size=1)
    for rank in range(2):
        held = {
            name: array if ".experts." in name else shard(name, array, rank, 2)
            for name, array in model.megatron().items()
        }
        write_rank(source / "iter_0000010" / f"mp_rank_{rank:02d}" / FILE, held, args=args)
    assert same(merge(source, tmp_path / "out", check_replicas=True)[1], model.weights())


def test_all_unknown_names_are_told_at_once_with_their_neighbours(tmp_path: Path) -> None:
    """slime#1575, slime#1780: `linear_qgkv` unknown; "Unsupported parameter name", one name after the other."""
    names = {"linear_qkv": "linear_qgkv", "mlp.linear_fc2": "mlp.linear_out"}

    def rename(name: str) -> str:
        return next((name.replace(old, new) for old, new in names.items() if f"{old}.weight" in name), name)

    source = write_legacy(tmp_path / "run", Decoder(), rename=rename)
    error = refuse(source, tmp_path / "out")
    assert "4 tensors unknown" in error.message
    assert "self_attention.linear_qgkv.weight (2 tensors), close to " in error.message
    assert "mlp.linear_out.weight" in error.message
    assert "--map" in str(error.hint)


def test_new_architecture_is_mapped_by_a_file(tmp_path: Path) -> None:
    """slime#1780, slime#2129: `post_self_attn_layernorm` of a new architecture needed a release of the converter."""
    model, extra = Decoder(), "decoder.layers.{}.post_self_attn_layernorm.weight"
    norms = {extra.format(layer): np.arange(16, dtype=np.float32) + layer for layer in range(2)}
    source = write_legacy(tmp_path / "run", model, tp=2, full=model.megatron() | norms)
    write_json(source / "hf" / "config.json", model.config(model_type="brand_new", architectures=["BrandNew"]))
    assert "--map" in str(refuse(source, tmp_path / "no").hint)
    rules = tmp_path / "rules.toml"
    rules.write_text(
        'family = "llama"\n[[rule]]\nfrom = "decoder.layers.{layer}.post_self_attn_layernorm.weight"\n'
        'to = "model.layers.{layer}.post_norm.weight"\n'
    )
    found = merge(source, tmp_path / "out", map=rules)[1]
    expected = {f"model.layers.{layer}.post_norm.weight": norms[extra.format(layer)] for layer in range(2)}
    assert same(found, model.weights() | expected)


@pytest.mark.parametrize("tied", [False, True])
def test_padding_of_the_vocabulary_is_cut_and_told(tied: bool, tmp_path: Path) -> None:
    """Bridge#625, Bridge#5375: embedding and lm_head came out with the rows that TP had padded."""
    model = Decoder(tied=tied)
    full = {name: _pad(array, 64) if _is_vocabulary(name) else array for name, array in model.megatron().items()}
    source = write_legacy(tmp_path / "run", model, tp=2, pp=2, full=full, args={"padded_vocab_size": 64})
    report, found = merge(source, tmp_path / "out")
    assert same(found, model.weights())
    assert "26 rows of padding" in words(report)


def _is_vocabulary(name: str) -> bool:
    return name in ("embedding.word_embeddings.weight", "output_layer.weight")


def _pad(array: Array, rows: int) -> Array:
    return np.concatenate([array, np.full((rows - len(array), *array.shape[1:]), np.nan, array.dtype)])


@pytest.mark.parametrize("bias", [False, True])
def test_value_head_of_megatron_makes_a_classifier(bias: bool, tmp_path: Path) -> None:
    """miles#2878, VeOmni#795: `output_layer [1, h]` was mapped on lm_head: a shape error, or a negative padding."""
    model = Decoder()
    head = {"output_layer.weight": np.full((1, 16), 0.5, np.float32)}
    head |= {"output_layer.bias": np.full(1, 0.25, np.float32)} if bias else {}
    padded = _pad(model.megatron()["embedding.word_embeddings.weight"], 64)
    full = model.megatron() | head | {"embedding.word_embeddings.weight": padded}
    source = write_legacy(tmp_path / "critic", model, tp=2, full=full, args={"padded_vocab_size": 64})
    report, found = merge(source, tmp_path / "out", value_model=True)
    expected = {name: array for name, array in model.weights().items() if name != "lm_head.weight"}
    score = {name.replace("output_layer", "score"): array for name, array in head.items()}
    assert same(found, expected | score)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    classifier = "LlamaForTokenClassification" if bias else "LlamaForSequenceClassification"
    assert (written["architectures"], report.family) == ([classifier], classifier)
    assert written.get("num_labels", len(written.get("id2label", "ab"))) == 1
    language_model = write_legacy(tmp_path / "actor", model, tp=2)
    assert "value head" in refuse(language_model, tmp_path / "no", value_model=True).message


ADAPTED = "decoder.layers.0.mlp.linear_fc2"


def add_adapter(model: Decoder) -> Weights:
    """The model with Megatron-Bridge's LoRA at one matrix, of values that bf16 cannot add exactly."""
    inner = np.linspace(-1, 1, 4 * model.ffn, dtype=np.float32).reshape(4, model.ffn)
    outer = np.linspace(0.001, 0.003, model.hidden * 4, dtype=np.float32).reshape(model.hidden, 4)
    adapter = {f"{ADAPTED}.adapter.linear_in.weight": inner, f"{ADAPTED}.adapter.linear_out.weight": outer}
    return model.megatron() | adapter


def test_adapters_of_megatron_are_never_dropped(tmp_path: Path) -> None:
    """NeMo-RL#2234, NeMo-RL#2190: the load "silently drops adapter parameters"."""
    full = add_adapter(Decoder())
    source = write_legacy(tmp_path / "run", Decoder(), full=full)
    assert "alpha" in refuse(source, tmp_path / "no").message
    report, found = merge(source, tmp_path / "out", lora_alpha=8)
    assert same(found, Decoder().weights())
    assert "do not contain the adapter" in warnings(report)
    adapter = read_tensors(tmp_path / "out" / "lora_adapter")
    stem = "base_model.model.model.layers.0.mlp.down_proj.lora_"
    assert {name: tensor.data for name, tensor in adapter.items()} == {
        f"{stem}A.weight": full[f"{ADAPTED}.adapter.linear_in.weight"].tobytes(),
        f"{stem}B.weight": full[f"{ADAPTED}.adapter.linear_out.weight"].tobytes(),
    }
    settings = json.loads((tmp_path / "out" / "lora_adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 8)


def test_adapters_of_megatron_are_fused_in_fp32(tmp_path: Path) -> None:
    """Bridge#2574: a merge by products in bf16 lost precision."""
    model = Decoder()
    full = add_adapter(model)
    source = write_legacy(tmp_path / "run", model, full=full)
    found = merge(source, tmp_path / "out", lora_alpha=8, fuse_lora=True)[1]
    name = "model.layers.0.mlp.down_proj.weight"
    inner, outer = (full[f"{ADAPTED}.adapter.linear_{side}.weight"].astype(np.float64) for side in ("in", "out"))
    exact = model.weights()[name].astype(np.float64) + 2.0 * (outer @ inner)
    got = np.frombuffer(found[name].data, np.float32).reshape(exact.shape)
    assert np.abs(got - exact).max() <= np.spacing(np.abs(exact).max().astype(np.float32))
    others = {key: array for key, array in model.weights().items() if key != name}
    assert same({key: tensor for key, tensor in found.items() if key != name}, others)


@pytest.mark.parametrize("case", ["megatron_legacy_deepseek_v3", "megatron_dist_ep2", "megatron_legacy_tp2ep2etp1"])
def test_rules_lead_there_and_back(case: str) -> None:
    """verl#2029, Megatron-LM#2846, NeMo Skills#640: source and target of a copy were swapped; one direction only.

    Every tensor of the file is made of Megatron's by one rule, and Megatron's of the file's by the same rule.
    """
    config = json.loads((COMMITTED / case / "hf" / "config.json").read_text())
    family = FAMILIES[config["model_type"]]
    rules, sizes = family.megatron, Sizes(config, family.all_defaults())
    architecture = read_architecture(config, FAMILIES)
    assert architecture is not None
    shapes = {**architecture.hub_shapes(), **architecture.hub_head_shapes(tied=False)}
    file = {name: Tensor(name, F32, shape, ()) for name, shape in shapes.items()}
    there = join(file, rules, sizes)
    assert (there.unknown, there.problems) == ([], [])
    back = split(there.tensors, rules, sizes)
    assert (back.unknown, back.problems) == ([], [])
    assert {name: value.shape for name, value in back.tensors.items()} == shapes
    assert len(there.tensors) < len(shapes)


def test_merged_ranks_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """Megatron-LM#706: what seemed wrong weights was the server: weights are compared with weights."""
    source = write_legacy(tmp_path / "run", Decoder(experts=4), tp=2, ep=2)
    unshard.merge(source, tmp_path / "out")
    assert unshard.verify(tmp_path / "out", source).holds
    changed: dict[str, Any] = Decoder(experts=4).megatron()
    name = "decoder.layers.1.mlp.experts.linear_fc1.weight2"
    changed[name] = changed[name] + np.eye(*changed[name].shape, dtype=np.float32)
    other = write_legacy(tmp_path / "other", Decoder(experts=4), tp=2, ep=2, full=changed)
    verdict = unshard.verify(tmp_path / "out", other)
    assert verdict.comparison is not None
    assert {failure.name for failure in verdict.comparison.failures} == {
        "model.layers.1.mlp.experts.2.gate_proj.weight"
    }
