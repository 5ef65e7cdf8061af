"""The table of golden checkpoints by torch.distributed.checkpoint and accelerate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from golden.make.lora import Lora
from golden.make.table import Case, Mesh
from golden_set import Run

_HF = ("--config", "{case}/hf")
_NO_CONFIG = (Run(error="--config"), Run(_HF), Run(("--weights-only",)))


@dataclass(frozen=True)
class SavedCase(Case):
    """A training job whose state torch.distributed.checkpoint (or accelerate, above it) saves.

    saver:      a key of `saving.SAVERS`, or "accelerate".
    root:       where the model's tensors lie in the tree that is saved; "" for its top.
    optimizer:  AdamW's state after one step at a learning rate of zero lies beside the model.
    side_files: the directory of config and tokenizer, below the case's own.
    folder:     where the checkpoint goes, below the case's directory.
    """

    model: str = "small_qwen2"
    saver: str = "plain"
    root: str = "model"
    optimizer: bool = False
    side_files: str = "ckpt"
    folder: str = "ckpt"

    def keep(self, name: str) -> bool:
        """Whether the trainer saves the entry: HuggingFaceStorageWriter writes no two names of one tensor."""
        return super().keep(name) and not (self.tied and self.saver == "hf_shards" and name == "lm_head.weight")


def _mesh(text: str) -> Mesh:
    return tuple((name, int(size)) for name, size in (part.split("=") for part in text.split()))


_UNEVEN: Mapping[str, Any] = {"model": "qwen2_7rows_18", "mesh": _mesh("fsdp=3 tp=2")}


def _dcp(name: str, about: str, **facts: Any) -> SavedCase:
    return SavedCase(f"dcp_{name}", about, **facts)


def _hf(name: str, about: str, *, saver: str = "hf_shards", **facts: Any) -> SavedCase:
    return SavedCase(f"hf_shards_{name}", about, saver=saver, root="", **facts)


def _accelerate(name: str, about: str, *, model: str = "small_llama", **facts: Any) -> SavedCase:
    """In a Trainer's checkpoint directory, which holds config and tokenizer too."""
    facts = {"folder": "ckpt/checkpoint-1", "side_files": "ckpt/checkpoint-1"} | facts
    return SavedCase(f"accelerate_{name}", about, model, saver="accelerate", **facts)


DCP = (
    _dcp("fsdp2", "an optimizer, numbers and a text beside the model", optimizer=True),
    _dcp(
        "no_config",
        "no config anywhere",
        model="small_llama",
        side_files="hf",
        runs=_NO_CONFIG,
    ),
    _dcp("flat_tied", "the model's names at the top, tied", root="", model="small_qwen3", dtype="fp16", tied=True),
    _dcp(
        "flat_optimizer",
        "the model's names beside those of the optimizer",
        root="",
        model="small_llama",
        optimizer=True,
    ),
    _dcp("app", "the tree of PyTorch's tutorials", root="app.model", dtype="bf16"),
    _dcp("state", "one more root that trainers use", root="state.model", model="small_llama"),
    _dcp("empty", "more ranks than pieces: one holds nothing", model="qwen2_9rows", mesh=_mesh("fsdp=6"), dtype="bf16"),
    _dcp("threads", "three threads: several files per rank", saver="threads"),
    _dcp("hsdp", "sharded in two, replicated twice", model="small_llama", mesh=_mesh("ddp=2 fsdp=2")),
    _dcp("tp", "FSDP over tensor parallelism", mesh=_mesh("fsdp=2 tp=2"), dtype="bf16"),
    _dcp("tp_uneven", "7 rows on 3 × 2 ranks: torch records wrong boxes", **_UNEVEN),
    _dcp("last_dim", "a placement function that shards the last dimension that divides", shard_last_dim=True),
    _dcp("custom_code", "a model of no known type, with fp8, int8, bool and int64 buffers", model="custom"),
    _dcp("moe", "packed experts, a dense first layer", model="qwen3_moe", dtype="bf16"),
    _dcp("fsdp1", "FSDP1 with a device mesh", engine="fsdp1", original_parameters=True),
    _dcp("fsdp1_sharded_tensor", "FSDP1 without a mesh", engine="fsdp1_sharded_tensor", mesh=_mesh("fsdp=3")),
    _dcp(
        "fsdp1_sharded_tensor_hsdp",
        "FSDP1 without a mesh, hybrid",
        engine="fsdp1_sharded_tensor",
        mesh=_mesh("ddp=2 fsdp=2"),
        model="small_llama",
    ),
    _dcp("full", "every rank holds the whole model: one writes each tensor", state="full", model="small_llama"),
    _dcp("rank_metadata", "`use_collectives=False`: metadata per rank", saver="rank_metadata"),
    _dcp(
        "rank_metadata_hsdp",
        "the same, hybrid: each replica is written",
        saver="rank_metadata",
        model="small_llama",
        mesh=_mesh("ddp=2 fsdp=2"),
    ),
    _dcp("safetensors", "items are safetensors", saver="safetensors", dtype="bf16"),
    _dcp("zstd", "items are compressed by torch's ZStandard extension", saver="zstd", dtype="bf16"),
    _dcp("async", "async_save", saver="async", model="small_llama"),
    _dcp("lora", "base model and adapter", model="small_llama", lora=Lora(facts="peft")),
    _dcp("lora_only", "the adapter alone", model="small_llama", lora=Lora(facts="peft"), lora_only=True),
)

HF_SHARDS = (
    _hf("w2", "a file per rank"),
    _hf(
        "no_config",
        "no config anywhere",
        model="small_llama",
        side_files="hf",
        runs=_NO_CONFIG,
    ),
    _hf("consolidated", "torch's own merger ran as well", saver="hf_consolidated"),
    _hf("whole", "rank 0 saves whole tensors", saver="hf_whole", state="full", model="small_llama"),
    _hf("two_files", "two files per rank", saver="hf_two_files", dtype="bf16", mesh=_mesh("fsdp=3")),
    _hf("tied", "tied: one of the names, for torch refuses both", model="small_qwen3", dtype="fp16", tied=True),
    _hf("hsdp", "sharded in two, replicated twice", model="small_llama", mesh=_mesh("ddp=2 fsdp=2")),
    _hf("tp", "FSDP over tensor parallelism", mesh=_mesh("fsdp=2 tp=2"), dtype="bf16"),
    _hf("tp_uneven", "7 rows on 3 × 2 ranks: torch records wrong offsets", **_UNEVEN),
    _hf("empty", "more ranks than pieces: one holds nothing", model="qwen2_9rows", mesh=_mesh("fsdp=6")),
    _hf("last_dim", "a placement function that shards the last dimension that divides", shard_last_dim=True),
    _hf("custom_code", "a model of no known type, with fp8, int8, bool and int64 buffers", model="custom"),
    _hf("moe", "packed experts, a dense first layer", model="qwen3_moe", dtype="bf16"),
)

ACCELERATE = (
    _accelerate("fsdp2", "sharded: a DCP directory for the model, another for the optimizer", optimizer=True),
    _accelerate("fsdp2_bf16_tied", "tied", model="small_qwen3", dtype="bf16", tied=True),
    _accelerate("fsdp2_run", "the directory above checkpoint-N is given, config in it", side_files="ckpt"),
    _accelerate("fsdp2_ranks", "sharded with `use_dcp=False`: a file per rank", state="ranks", model="small_qwen2"),
    _accelerate("fsdp2_full", "full", state="full"),
    _accelerate("fsdp1", "sharded", engine="fsdp1", model="small_qwen2"),
    _accelerate("fsdp1_local", "local: flat parameters", engine="fsdp1", state="local"),
    _accelerate("fsdp2_lora", "base model and adapter", lora=Lora(facts="peft")),
)

CASES = (*DCP, *HF_SHARDS, *ACCELERATE)
