"""The table of golden checkpoints: one line of facts each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from golden.make.lora import Lora
from golden_set import Run, adapter_runs

Mesh = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Case:
    """A training job in miniature. The defaults are verl's: FSDP2 over one mesh dimension, a sharded state dict.

    engine:   "fsdp2", "fsdp1" (device mesh: DTensor), "fsdp1_sharded_tensor" (no mesh), "none" (one process).
    mesh:     (dimension, size) pairs, the slowest first; the last but one replicates under FSDP1 and FSDP2.
    tensor_dim: the mesh dimension that is tensor parallel, if it occurs.
    state:    the state dict's flavour: sharded, full, full_rank0, local, or named_parameters.
    source:   what is given to `unshard merge`, below the case's directory.
    transformers: the major version that the model is made with; the others' cases are left alone.
    """

    name: str
    about: str
    model: str = "qwen2"
    dtype: str = "fp32"
    task: str = "causal"
    tied: bool = False
    untied_in_training: bool = False
    value_head: Literal["flat", "wrapped"] | None = None
    engine: str = "fsdp2"
    mesh: Mesh = (("fsdp", 2),)
    tensor_dim: str = "tp"
    sequence_parallel: bool = False
    shard_last_dim: bool = False
    original_parameters: bool = False
    checkpointed: bool = False
    compiled: bool = False
    state: str = "sharded"
    layout: str = "verl"
    source: str = "ckpt"
    fsdp_config: bool = True
    trainer_state: bool = False
    legacy_stream: bool = False
    lora: Lora | None = None
    lora_only: bool = False
    seed: int = 0
    transformers: int = 5
    runs: tuple[Run, ...] = field(default=())

    @property
    def world(self) -> int:
        """The number of ranks."""
        world = 1
        for _, size in self.mesh:
            world *= size
        return world

    def keep(self, name: str) -> bool:
        """Whether the trainer saves the entry: verl's `save_lora_only` keeps the adapter alone."""
        return not self.lora_only or "lora_" in name

    def all_runs(self) -> tuple[Run, ...]:
        """The runs of the table, or those that every checkpoint of its kind must stand."""
        if self.runs:
            return self.runs
        return (Run(),) if self.lora is None else adapter_runs(adapter_alone=self.lora_only)


def _mesh(text: str) -> Mesh:
    return tuple((name, int(size)) for name, size in (part.split("=") for part in text.split()))


def _lora(name: str, about: str, lora: Lora | None = None, model: str = "llama", **facts: Any) -> Case:
    return Case(name, about, lora=lora or Lora(), model=model, **facts)


_HF = ("--config", "{case}/hf")

FSDP2 = (
    Case("fsdp2_w4", "row shards, uneven", mesh=_mesh("fsdp=4"), trainer_state=True),
    Case("fsdp2_w1", "a world of one", mesh=_mesh("fsdp=1"), model="llama"),
    Case("fsdp2_w8_empty", "more ranks than rows: some hold nothing", model="qwen2_9rows", mesh=_mesh("fsdp=8")),
    Case("fsdp2_bf16_tied", "tied embeddings saved twice", model="qwen3", dtype="bf16", tied=True),
    Case("fsdp2_fp16_w3", "half precision", model="mistral", dtype="fp16", mesh=_mesh("fsdp=3")),
    Case("fsdp2_mixed_dtypes", "norms in fp32, biases in fp16, the rest in bf16", dtype="mixed"),
    Case("fsdp2_hsdp", "sharded in two, replicated twice", model="llama", mesh=_mesh("ddp=2 fsdp=2")),
    Case("fsdp2_hsdp_names", "mesh dimensions with names of their own", model="llama", mesh=_mesh("copies=2 pieces=3")),
    Case("fsdp2_tp", "FSDP over tensor parallelism", mesh=_mesh("fsdp=2 tp=2"), dtype="bf16"),
    Case(
        "fsdp2_tp_names",
        "tensor parallelism under another name, norms replicated over it",
        model="llama",
        mesh=_mesh("data=2 model=2"),
        tensor_dim="model",
        sequence_parallel=True,
    ),
    Case("fsdp2_tp_3x2_uneven", "7 and 19 rows on 3 × 2 ranks", model="qwen2_7rows", mesh=_mesh("fsdp=3 tp=2")),
    Case("fsdp2_tp_4x2_uneven", "9 and 17 rows on 4 × 2 ranks", model="qwen2_9rows", mesh=_mesh("fsdp=4 tp=2")),
    Case(
        "fsdp2_3d", "replicated, sharded, tensor parallel", mesh=_mesh("dp_replicate=2 dp_shard=2 tp=2"), model="llama"
    ),
    Case(
        "fsdp2_shard_last_dim", "a placement function that shards the last dimension that divides", shard_last_dim=True
    ),
    Case("fsdp2_buffers", "a persistent buffer in each layer, replicated", model="gemma4_text", mesh=_mesh("fsdp=3")),
    Case("fsdp2_custom_code", "a model of no known type, with fp8, int8, bool and int64 buffers", model="custom"),
    Case("fsdp2_token_classification", "a critic", task="token", dtype="bf16"),
    Case("fsdp2_value_head", "TRL's value head, saved by TRL's own state_dict()", value_head="flat"),
    Case("fsdp2_value_head_wrapped", "TRL's value head, saved from outside", value_head="wrapped", dtype="bf16"),
    Case(
        "fsdp2_wrapped",
        "named_parameters() of a compiled model with checkpointed blocks: the wrappers' prefixes stay",
        model="llama",
        state="named_parameters",
        checkpointed=True,
        compiled=True,
    ),
    Case("fsdp2_full_w2", "every rank saves the whole model", state="full", model="llama"),
)

FAMILIES = (
    Case("fsdp2_mixtral", "packed experts", model="mixtral", mesh=_mesh("fsdp=2")),
    Case("fsdp2_qwen2_moe", "packed experts and a shared one", model="qwen2_moe", dtype="bf16"),
    Case("fsdp2_qwen3_moe", "packed experts, a dense first layer", model="qwen3_moe", mesh=_mesh("fsdp=3")),
    Case("fsdp2_qwen2_vl", "vision and language", model="qwen2_vl"),
    Case("fsdp2_qwen2_5_vl", "vision and language", model="qwen2_5_vl", dtype="bf16", mesh=_mesh("fsdp=3")),
    Case("fsdp2_qwen2_vl_tied", "vision and language, tied", model="qwen2_vl", tied=True),
)

TRANSFORMERS_4 = (
    Case("tf4_mixtral", "one tensor per expert", model="mixtral", transformers=4),
    Case("tf4_qwen3_moe", "one tensor per expert", model="qwen3_moe", dtype="bf16", transformers=4),
    Case("tf4_qwen2_vl", "vision and language", model="qwen2_vl", transformers=4),
    Case("tf4_qwen2_5_vl", "vision and language, FSDP1", model="qwen2_5_vl", engine="fsdp1", transformers=4),
)

FSDP1 = (
    Case("fsdp1_dtensor", "FSDP1 with a device mesh", engine="fsdp1", original_parameters=True),
    Case("fsdp1_dtensor_hsdp", "FSDP1, hybrid", engine="fsdp1", mesh=_mesh("ddp=2 fsdp=2"), model="llama"),
    Case("fsdp1_dtensor_tied", "FSDP1, tied", engine="fsdp1", tied=True, dtype="bf16", mesh=_mesh("fsdp=3")),
    Case("fsdp1_w1", "FSDP1 in a world of one: plain tensors", engine="fsdp1", mesh=_mesh("fsdp=1"), model="llama"),
    Case("fsdp1_sharded_tensor", "FSDP1 without a mesh", engine="fsdp1_sharded_tensor", mesh=_mesh("fsdp=3")),
    Case(
        "fsdp1_sharded_tensor_empty",
        "ranks without a local shard",
        engine="fsdp1_sharded_tensor",
        model="qwen2_7rows",
        mesh=_mesh("fsdp=8"),
        dtype="bf16",
    ),
    Case(
        "fsdp1_sharded_tensor_hsdp",
        "FSDP1 without a mesh, hybrid",
        engine="fsdp1_sharded_tensor",
        mesh=_mesh("ddp=2 fsdp=2"),
        model="llama",
    ),
    Case(
        "fsdp1_sharded_tensor_reward",
        "a reward model, fp16",
        engine="fsdp1_sharded_tensor",
        model="llama",
        task="token",
        dtype="fp16",
    ),
    Case("fsdp1_checkpointed", "FSDP1 with checkpointed blocks", engine="fsdp1", checkpointed=True, model="llama"),
    Case("fsdp1_full_rank0", "rank 0 holds everything, rank 1 nothing", engine="fsdp1", state="full_rank0"),
    Case("fsdp1_full", "every rank holds everything", engine="fsdp1", state="full", model="llama"),
    Case(
        "fsdp1_local",
        "flat parameters only",
        engine="fsdp1_sharded_tensor",
        state="local",
        mesh=_mesh("fsdp=3"),
        tied=True,
    ),
    Case(
        "fsdp1_local_original",
        "flat parameters and the fragments of the original ones",
        engine="fsdp1_sharded_tensor",
        state="local",
        mesh=_mesh("fsdp=3"),
        original_parameters=True,
        dtype="bf16",
    ),
    Case(
        "fsdp1_local_original_tied",
        "a tied parameter has fragments under both of its names",
        engine="fsdp1_sharded_tensor",
        state="local",
        model="qwen3",
        tied=True,
        original_parameters=True,
    ),
    Case(
        "fsdp1_local_unknown_family",
        "flat parameters of a model whose shapes only a reference knows",
        engine="fsdp1_sharded_tensor",
        state="local",
        model="gemma4_text",
        runs=(Run(error="shapes-from"), Run(("--shapes-from", "{case}/truth"))),
    ),
)

LAYOUTS = (
    Case("layout_no_fsdp_config", "the world size stands in the names only", fsdp_config=False, model="llama"),
    Case("layout_run", "a run directory with two steps", layout="verl_run", model="llama"),
    Case("layout_step", "a step's directory is given", layout="verl_run", model="llama", source="ckpt/global_step_20"),
    Case("layout_rank_files", "rank_R.pt", layout="rank_files", model="llama"),
    Case("layout_skyrl", "SkyRL", layout="skyrl", model="llama"),
    Case("layout_easyr1", "EasyR1", layout="easyr1", model="llama"),
    Case("layout_accelerate_sharded", "accelerate without DCP", layout="accelerate", model="llama"),
    Case(
        "layout_accelerate_full", "accelerate, full", layout="accelerate", state="full", engine="fsdp1", model="llama"
    ),
    Case(
        "layout_accelerate_local",
        "accelerate, local",
        layout="accelerate",
        state="local",
        engine="fsdp1_sharded_tensor",
        model="qwen3",
    ),
    Case(
        "layout_nodes",
        "two nodes with a disk each",
        layout="nodes",
        mesh=_mesh("fsdp=4"),
        model="llama",
        source="ckpt/node0",
        runs=(Run(error=r"rank.*2.*3"), Run(("--also", "{case}/ckpt/node1"))),
    ),
    Case(
        "layout_lone_file",
        "one file without a configuration",
        layout="lone_file",
        engine="none",
        mesh=_mesh("one=1"),
        source="ckpt/model.pt",
        model="llama",
        runs=(Run(error="--config"), Run(_HF), Run(("--weights-only",))),
    ),
    Case(
        "layout_legacy_stream",
        "one file in the stream format of torch before 1.6",
        layout="lone_file",
        legacy_stream=True,
        engine="none",
        mesh=_mesh("one=1"),
        source="ckpt/model.pt",
        tied=True,
        dtype="bf16",
        runs=(Run(_HF),),
    ),
)

TIES = (
    Case(
        "tied_but_different",
        "the config ties what training let drift apart",
        model="qwen3",
        tied=True,
        untied_in_training=True,
        runs=(
            Run(error="lm_head"),
            Run(("--tie-word-embedding",), model="truth"),
            Run(("--untie-word-embedding",), model="truth_untied"),
        ),
    ),
)

LORA = (
    _lora("lora", "base model and adapter, rank and alpha in verl's meta file"),
    _lora("lora_bf16_w3", "the same in bf16", dtype="bf16", mesh=_mesh("fsdp=3"), tied=True),
    _lora("lora_only", "the adapter alone", lora_only=True),
    _lora("lora_fsdp1", "FSDP1", engine="fsdp1_sharded_tensor", original_parameters=True),
    _lora("lora_dora", "DoRA", Lora(options={"use_dora": True}, facts="peft")),
    _lora("lora_rslora", "rsLoRA", Lora(options={"use_rslora": True}, facts="peft")),
    _lora(
        "lora_patterns",
        "ranks and alphas per module",
        Lora(
            options={"rank_pattern": {"q_proj": 2, "down_proj": 6}, "alpha_pattern": {"layers.0.mlp.down_proj": 5}},
            facts="peft",
        ),
    ),
    _lora("lora_embedding", "an embedding as a target", Lora(targets=("embed_tokens", "k_proj"))),
    _lora(
        "lora_modules_to_save",
        "whole modules trained beside the adapter",
        Lora(options={"modules_to_save": ["lm_head"]}, facts="peft"),
    ),
    _lora(
        "lora_bias",
        "an adapter with biases of its own",
        Lora(targets=("q_proj", "v_proj"), options={"lora_bias": True}, facts="peft"),
        model="qwen2",
    ),
    _lora(
        "lora_no_alpha",
        "nothing in the checkpoint tells alpha",
        Lora(facts="none"),
        runs=(
            Run(error="alpha"),
            Run(("--lora-alpha", "8"), adapter="truth_adapter"),
            Run(("--lora-alpha", "8", "--fuse-lora"), model="truth_merged", fused=True),
        ),
    ),
)

CASES = (*FSDP2, *FAMILIES, *TRANSFORMERS_4, *FSDP1, *LAYOUTS, *TIES, *LORA)

DEMO = (
    Case("model", "4 ranks, tied embeddings, fp32", model="qwen3_demo", tied=True, mesh=_mesh("fsdp=4")),
    Case(
        "model_with_lora",
        "4 ranks, a LoRA run in bf16",
        model="qwen3_demo",
        tied=True,
        mesh=_mesh("fsdp=4"),
        dtype="bf16",
        lora=Lora(rank=8, alpha=16),
    ),
)
"""What `unshard demo` merges: not a case, but made in the same way."""
