"""Faults from the field in what a merge takes: memory and disk that grow with the checkpoint, plans of an hour."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import pytest

import dcp_bytes
import hf_shard_bytes
from deepspeed_bytes import Hole, Job
from fsdp_bytes import Mesh, RankFile, rank_path, world, write_json, write_ranks
from megatron_bytes import FILE, Decoder, write_rank
from synthetic import dense_70b

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc"),
]

MEASURED = """
import sys, time
from unshard.cli import main
code = main(sys.argv[1:])
status = open("/proc/self/status").read().splitlines()
peak = next(line.split()[1] for line in status if line.startswith("VmHWM:"))
moved = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())
print(moved["rchar"], moved["wchar"], peak, time.process_time(), file=sys.stderr)
sys.exit(code)
"""
MIB = 1 << 20


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory that does not outlive the test: what is merged from holes fills the disk all the same."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@dataclass(frozen=True)
class Usage:
    """Peak resident memory in MB (10**6 bytes), and seconds of processor time: other processes do not change them.

    read, written: MB that went through system calls, Python's own modules among them.
    """

    memory: float
    seconds: float
    read: float
    written: float


def measure(*arguments: object) -> Usage:
    """What a command takes in a process of its own."""
    words = [sys.executable, "-c", MEASURED, *map(str, arguments)]
    ended = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False, text=True)
    assert ended.returncode == 0, ended.stderr
    read, written, peak, seconds = ended.stderr.split()[-4:]
    usage = Usage(int(peak) * 1024 / 1e6, float(seconds), int(read) / 1e6, int(written) / 1e6)
    print(f"{arguments[0]} {' '.join(map(str, arguments[3:]))}: {usage}")
    return usage


def checkpoint(directory: Path, size: int) -> Path:
    """A checkpoint of four ranks and `size` bytes, of bf16 tensors of eight MiB."""
    shapes = {f"layers.{number}.weight": (4096, 1024) for number in range(size // (8 * MIB))}
    return write_ranks(directory, world(4), shapes)


@pytest.mark.parametrize(("verify", "limit"), [("structure", 80), ("full", 100)])
@pytest.mark.parametrize("dtype", ["keep", "fp32"])
def test_memory_does_not_grow_with_the_model(dtype: str, verify: str, limit: int, place: Path) -> None:
    """llm-foundry#463, Automodel#1093, mergekit#107, DeepSpeed#4025: killed at 192 GB, twice the model in RAM."""
    usages = {}
    for size in (64 * MIB, 256 * MIB):
        source = checkpoint(place / f"{size}", size)
        words = ("--weights-only", "--verify", verify, "--dtype", dtype, "--max-shard-size", "100MB")
        usages[size] = measure("merge", source, place / f"out{size}", *words)
    small, large = (usage.memory for usage in usages.values())
    assert large <= limit
    assert large <= 1.1 * small


def write_zero(directory: Path, stage: int, weights: Mapping[str, tuple[int, ...]]) -> Path:
    """ZeRO's partitions of four ranks: masters of ones, moments that are holes of 3.6 GB per rank."""
    job = Job(stage, 4, [{name: np.ones(shape, np.float32) for name, shape in weights.items()}])
    files = job.files()
    for name, saved in files.items():
        if name.endswith("optim_states.pt"):
            moments = {name: Hole((450_000_000,)) for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum")}
            state = saved.content["optimizer_state_dict"]
            state["optimizer_state_dict" if stage == 3 else "base_optimizer_state"] = {"state": {0: moments}}
    return job.write(directory, files)


@pytest.mark.parametrize("stage", [2, 3])
def test_moments_are_neither_held_nor_read(stage: int, place: Path) -> None:
    """DeepSpeed#1062, #4025, #6526, LlamaFactory#509: RAM filled with states of the optimizer; BLOOM's took 3.5 TB.

    Of a 14 GB checkpoint with 67 MB of masters, these are read to be written and again to be compared with the model,
    and nothing is written but the model.
    """
    source = write_zero(place / "global_step7", stage, {f"layers.{n}.weight": (2048, 1024) for n in range(8)})
    assert sum(file.stat().st_size for file in source.iterdir()) > 14e9
    usage = measure("merge", source, place / "out", "--weights-only")
    size = (place / "out/model.safetensors").stat().st_size / 1e6
    assert 67 < size < 68
    assert usage.memory <= 80
    assert usage.read <= 3 * size + 20
    assert usage.written <= size + 1


def write_dcp(directory: Path, weights: Mapping[str, tuple[int, ...]]) -> Path:
    """A model of four ranks in torch's DCP, and an optimizer three times its size."""
    arrays = {f"model.{name}": np.ones(shape, np.float32) for name, shape in weights.items()}
    moments = {
        f"optim.state.{name}.{kind}": array for name, array in arrays.items() for kind in ("exp_avg", "exp_avg_sq")
    }
    return dcp_bytes.sharded(directory, arrays | moments, 4).finish()


def write_hf_shards(directory: Path, weights: Mapping[str, tuple[int, ...]]) -> Path:
    """A model of four ranks in torch's safetensors shards."""
    hf_shard_bytes.write_ranks(directory, {name: np.ones(shape, np.float32) for name, shape in weights.items()}, 4)
    return directory


WRITERS: Mapping[str, Callable[[Path, Mapping[str, tuple[int, ...]]], Path]] = {
    "DCP": write_dcp,
    "shards": write_hf_shards,
    "ZeRO-2": lambda directory, weights: write_zero(directory, 2, weights),
    "ZeRO-3": lambda directory, weights: write_zero(directory, 3, weights),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_slices_are_read_whatever_the_layout(kind: str, place: Path) -> None:
    """Automodel#1093, Automodel#2690, mergekit#107, llm-foundry#1220: full tensors, or all of them, in memory."""
    shapes = {"one": (32768, 1024), **{f"layers.{number}.weight": (2048, 1024) for number in range(4)}}
    source = WRITERS[kind](place / "checkpoint", shapes)
    usage = measure("merge", source, place / "out", "--weights-only", "--max-shard-size", "100MB")
    size = sum(file.stat().st_size for file in (place / "out").iterdir()) / 1e6
    assert 167 < size < 169
    assert usage.memory <= 80
    assert usage.read <= 3 * size + 20
    assert usage.written <= size + 1


WIDE: Mapping[str, tuple[tuple[int, ...], Mesh, tuple[int, ...]]] = {
    "rows": ((65536, 1024), world(4), (0,)),
    "columns": ((65536, 1024), world(4), (1,)),
    "experts packed": ((64, 1024, 1024), world(4), (0,)),
    "experts cut across": ((64, 1024, 1024), Mesh({"fsdp": 2, "tp": 2}), (2, 1)),
}


@pytest.mark.parametrize("kind", WIDE)
@pytest.mark.parametrize("dtype", ["keep", "fp32"])
def test_one_huge_tensor_is_never_held_whole(dtype: str, kind: str, place: Path) -> None:
    """mbridge#123, Automodel#2690: a very high peak where all experts of a layer are stacked into one tensor."""
    shape, mesh, placements = WIDE[kind]
    source = write_ranks(place / "actor", mesh, {"weight": shape}, placements)
    assert prod(shape) * 2 == 128 * MIB
    assert measure("merge", source, place / "out", "--weights-only", "--dtype", dtype).memory <= 100


def test_fusing_holds_no_whole_weight(place: Path) -> None:
    """NeMo-RL#2190, mbridge#123: an adapter is fused into 128 MiB of one weight, piece by piece."""
    layer = "base_model.model.proj"
    shapes = {
        f"{layer}.base_layer.weight": (16384, 4096),
        f"{layer}.lora_A.default.weight": (8, 4096),
        f"{layer}.lora_B.default.weight": (16384, 8),
    }
    source = write_ranks(place / "actor", world(4), shapes)
    words = ("--weights-only", "--fuse-lora", "--lora-alpha", 16)
    assert measure("merge", source, place / "out", *words).memory <= 120


def write_experts(run: Path, model: Decoder) -> Path:
    """A layer of experts on two tensor-parallel ranks, as holes: half of the vocabulary, of rows, of columns each."""
    rows, layer = (model.heads + 2 * model.groups) * model.head, "decoder.layers.0."
    held: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (model.vocabulary // 2, model.hidden),
        f"{layer}self_attention.linear_qkv.layer_norm_weight": (model.hidden,),
        f"{layer}self_attention.linear_qkv.weight": (rows // 2, model.hidden),
        f"{layer}self_attention.q_layernorm.weight": (model.head,),
        f"{layer}self_attention.k_layernorm.weight": (model.head,),
        f"{layer}self_attention.linear_proj.weight": (model.hidden, model.heads * model.head // 2),
        f"{layer}pre_mlp_layernorm.weight": (model.hidden,),
        f"{layer}mlp.router.weight": (model.experts, model.hidden),
        "decoder.final_layernorm.weight": (model.hidden,),
        "output_layer.weight": (model.vocabulary // 2, model.hidden),
    }
    for number in range(model.experts):
        held[f"{layer}mlp.experts.linear_fc1.weight{number}"] = (model.ffn, model.hidden)
        held[f"{layer}mlp.experts.linear_fc2.weight{number}"] = (model.hidden, model.ffn // 2)
    for rank in range(2):
        place = run / f"mp_rank_{rank:02d}"
        place.mkdir(parents=True)
        write_rank(place / FILE, held, args=model.args(tensor_model_parallel_size=2))
    write_json(run / "hf" / "config.json", model.config())
    return run


@pytest.mark.parametrize("words", [("--weights-only",), ()], ids=["stacked", "one by one"])
def test_experts_of_megatron_are_never_held_together(words: tuple[str, ...], place: Path) -> None:
    """mbridge#123, Bridge#1783, slime#524, ms-swift#6418: the experts of a layer, or the whole model, lay in memory."""
    source = write_experts(place / "run", Decoder(layers=1, experts=32, hidden=1024, ffn=1024, vocabulary=64))
    usage = measure("merge", source, place / "out", *words)
    assert sum(file.stat().st_size for file in (place / "out").glob("*.safetensors")) > 128 * MIB
    assert usage.memory <= 120


def write_70b(directory: Path) -> Path:
    """Llama 70B of 64 ranks: 720 tensors in the layers and three around them, 141 GB of holes."""
    mesh = world(64)
    files = [RankFile(mesh, rank) for rank in range(64)]
    for tensor in dense_70b():
        for file, chunk in zip(files, tensor.chunks, strict=True):
            file.add_dtensor(tensor.name, tensor.shape, (0,), chunk.box.sizes)
    directory.mkdir()
    for rank, file in enumerate(files):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            file.add_shard(name, (128256, 8192))
        file.add_shard("model.norm.weight", (8192,))
        file.write(rank_path(directory, mesh, rank))
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "intermediate_size": 28672,
        "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 80, "vocab_size": 128256,
        "tie_word_embeddings": False,
    }  # fmt: skip
    write_json(directory / "huggingface" / "config.json", config)
    return directory


def test_plan_of_70b_from_64_ranks_takes_seconds(place: Path) -> None:
    """DeepSpeed#6526, DeepSpeed#1062: 70B "can take hours", and more than a terabyte of memory."""
    source = write_70b(place / "actor")
    usage = measure("plan", source, "--save", place / "plan.json")
    plan = json.loads((place / "plan.json").read_text())
    assert 141e9 < sum(file["size"] for file in plan["files"]) < 142e9
    assert usage.seconds <= 10
    assert usage.memory <= 500
