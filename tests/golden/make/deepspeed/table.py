"""The table of DeepSpeed's golden checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from golden.make.lora import Lora
from golden_set import Run, adapter_runs

_HF = ("--config", "{case}/hf")
_MODEL = ("--weights", "model")


@dataclass(frozen=True)
class DeepSpeedCase:
    """A training job of DeepSpeed in miniature: one step of AdamW, then `save_checkpoint`.

    model:      a key of `models.CONFIGS`, or "custom".
    groups:     "one"; "two": matrices and vectors; "small": the smallest parameter alone, and the others.
    frozen:     parameters whose name contains this text are not trained.
    exclude_frozen: `save_checkpoint(exclude_frozen_parameters=True)`.
    buffer:     a persistent buffer that the model's class does not know.
    zero:       what the section `zero_optimization` of the configuration says besides the stage.
    config:     what the configuration says besides.
    universal:  the checkpoint is what `ds_to_universal` makes of the job's.
    gathered:   `save_16bit_model` as well, as transformers' Trainer does at stage 3.
    folder:     where the checkpoint goes, below the case's directory.
    side_files: the directory of config and tokenizer, below the case's own.
    """

    name: str
    about: str
    stage: int
    model: str = "small_llama"
    dtype: str = "bf16"
    tied: bool = False
    world: int = 2
    groups: str = "one"
    frozen: str = ""
    exclude_frozen: bool = False
    buffer: bool = False
    lora: Lora | None = None
    zero: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    universal: bool = False
    gathered: bool = False
    folder: str = "ckpt"
    side_files: str = "ckpt"
    source: str = "ckpt"
    seed: int = 0
    runs: tuple[Run, ...] = field(default=())

    def all_runs(self) -> tuple[Run, ...]:
        """The runs of the table, or those that every checkpoint of its kind must stand."""
        if self.runs:
            return self.runs
        if self.lora is not None:
            model = Run(_MODEL, model="truth16", adapter="truth16_adapter")
            return (*adapter_runs(adapter_alone=False), model)
        if self.stage == 0:  # where there are masters, nothing names them
            return Run(), Run(_MODEL)
        kept = "_raw" if self.buffer else ""
        masters = Run(model=f"truth{kept}")
        return (masters,) if self.dtype == "fp32" else (masters, Run(_MODEL, model=f"truth16{kept}"))


def _zero(stage: int, name: str, about: str, **facts: Any) -> DeepSpeedCase:
    return DeepSpeedCase(f"deepspeed_z{stage}_{name}", about, stage, **facts)


_FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
_SUB_GROUPS = {"sub_group_size": 100}

STAGE_0 = (
    _zero(0, "fp32", "no ZeRO: the model is whole", dtype="fp32"),
    _zero(0, "bf16", "no ZeRO, bf16", tied=True),
    _zero(0, "fp16", "no ZeRO, fp16", dtype="fp16"),
)

STAGE_1 = (
    _zero(1, "bf16", "partitions of masters", model="small_qwen2"),
    _zero(1, "fp32_w3", "three ranks", dtype="fp32", world=3),
    _zero(1, "bf16_optimizer", "BF16_Optimizer: gradients summed in fp32", config=_FP32_SUMS),
    _zero(
        1,
        "bf16_optimizer_groups",
        "the same, two groups",
        config=_FP32_SUMS,
        groups="two",
        model="small_qwen2",
        world=3,
    ),
)

STAGE_2 = (
    _zero(2, "bf16", "partitions of masters", model="small_qwen2"),
    _zero(2, "w1", "a world of one", world=1),
    _zero(2, "fp16_w4", "half precision, four ranks", dtype="fp16", world=4),
    _zero(2, "fp32_groups", "two groups", dtype="fp32", groups="two", model="small_qwen2"),
    _zero(2, "tied", "tied, three ranks", tied=True, model="small_qwen3", world=3),
    _zero(2, "frozen_buffer", "attention frozen, a buffer", frozen="self_attn", buffer=True),
    _zero(
        2,
        "excluded",
        "a frozen embedding left out",
        frozen="embed_tokens",
        exclude_frozen=True,
        runs=(
            Run(error=r"model\.embed_tokens\.weight.*--fill-from"),
            Run(("--fill-from", "{case}/truth")),
        ),
    ),
    _zero(2, "aligned", "gaps behind parameters", zero={"parameter_alignment": True}, model="qwen2_9rows"),
    _zero(2, "round_robin", "parameters dealt out in turn", zero={"round_robin_gradients": True}, world=3),
    _zero(2, "custom_code", "a group of one element: the last rank holds none", model="custom", groups="small"),
    _zero(2, "lora", "an adapter on a frozen base", lora=Lora(facts="peft")),
    _zero(
        2,
        "no_config",
        "no config anywhere",
        side_files="hf",
        runs=(Run(error="--config"), Run(_HF), Run((*_HF, *_MODEL), model="truth16"), Run(("--weights-only",))),
    ),
    _zero(
        2,
        "trainer",
        "the directory of a Trainer's step",
        folder="ckpt/checkpoint-1",
        side_files="ckpt/checkpoint-1",
        source="ckpt/checkpoint-1",
    ),
)

STAGE_3 = (
    _zero(3, "bf16", "each parameter cut in pieces", model="small_qwen2"),
    _zero(3, "w1", "a world of one", world=1),
    _zero(3, "fp32_w3", "three ranks", dtype="fp32", world=3),
    _zero(3, "fp16_groups_w4", "two groups, four ranks", dtype="fp16", groups="two", world=4),
    _zero(3, "sub_groups", "several sub-groups", zero=_SUB_GROUPS, model="small_qwen2"),
    _zero(3, "tied", "tied", tied=True, model="small_qwen3"),
    _zero(3, "frozen_buffer", "attention frozen, a buffer", frozen="self_attn", buffer=True, world=3),
    _zero(
        3,
        "excluded",
        "a frozen embedding left out",
        frozen="embed_tokens",
        exclude_frozen=True,
        runs=(
            Run(error=r"model\.embed_tokens\.weight.*--fill-from"),
            Run(("--fill-from", "{case}/truth")),
        ),
    ),
    _zero(3, "lora", "an adapter on a frozen base", lora=Lora(facts="peft")),
    _zero(3, "gathered", "the 16-bit model beside the partitions", gathered=True),
    _zero(3, "hpz", "secondary partitions", zero={"zero_hpz_partition_size": 2}, world=4),
    _zero(3, "moe", "packed experts", model="qwen3_moe"),
)

UNIVERSAL = (
    _zero(
        2, "universal", "a universal checkpoint", universal=True, side_files="hf", runs=(Run(_HF),), model="small_qwen2"
    ),
    _zero(3, "universal", "a universal checkpoint", universal=True, side_files="hf", runs=(Run(_HF),)),
)

CASES = (*STAGE_0, *STAGE_1, *STAGE_2, *STAGE_3, *UNIVERSAL)
