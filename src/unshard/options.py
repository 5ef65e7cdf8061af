"""What a person can ask of a merge. The command line and the Python API fill this in; nobody else reads argv."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from unshard.errors import UsageError
from unshard.parallel import check_sizes
from unshard.settings import Settings

Cast: TypeAlias = Literal["keep", "bf16", "fp16", "fp32"]
Container: TypeAlias = Literal["safetensors", "bin"]
VerifyMode: TypeAlias = Literal["full", "sample", "structure"]
Weights: TypeAlias = Literal["master", "model"]
"""Of a checkpoint that keeps its parameters twice: the optimizer's fp32 masters, or the low-precision copies."""

DTYPE_CHOICES: tuple[str, ...] = get_args(Cast)
CONTAINERS: tuple[str, ...] = get_args(Container)
VERIFY_MODES: tuple[str, ...] = get_args(VerifyMode)
WEIGHTS_CHOICES: tuple[str, ...] = get_args(Weights)

DEFAULT_SHARD_SIZE = 5_000_000_000
"""Bytes; transformers 4's and the hub's own default."""


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """All options of `merge` and `plan`.

    also:           further roots with pieces of the same checkpoint.
    config:         a directory (or config.json) whose config, tokenizer and other side files are used.
    tokenizer:      a directory whose tokenizer is used, whatever else lies beside the checkpoint.
    map:            a file with rules of one's own (`unshard.mapping`).
    names:          "hub" (as save_pretrained writes them), "stored", or a reference model's directory.
    dtype:          "keep", "bf16", "fp16", "fp32": floating-point tensors only.
    container:      "safetensors" or "bin".
    max_shard_size: bytes of tensor data per weights file.
    overwrite:      replace what lies at the output.
    weights_only:   write stored names without a config; ties nothing.
    verify:         how much of the contents is read back.
    check_replicas: compare the bytes of all replicas before writing.
    tie_embeddings: None: as the config says; True: drop lm_head though it differs; False: keep both, say so in config.
    value_model:    the checkpoint is a critic or reward model.
    attention_heads, key_value_heads: used where no config tells; must agree with one that does.
    fuse_lora, adapter_only, lora_alpha: see the LoRA guide.
    shapes_from:    a reference model's directory, for shapes that the checkpoint does not store: FSDP1 flat parameters,
                    torch's safetensors shards.
    repair_index:   take the tensors of a Hugging Face directory whose index is wrong from the files as they are.
    model_key:      where in a training state the model lies ("app.model"), where it holds several; None: it is found.
    weights:        "master" or "model", where a checkpoint keeps parameters twice; None: masters where there are any.
    fill_from:      a base model's directory, for parameters that the checkpoint was saved without.
    parallel:       sizes of Megatron's parallelism (`unshard.parallel`), where the checkpoint leaves them open.
    backend:        what the user says lies there (verl's word); it must agree with what does.
    settings:       how hard to work.
    """

    also: tuple[Path, ...] = ()
    config: Path | None = None
    tokenizer: Path | None = None
    map: Path | None = None
    names: str = "hub"
    dtype: Cast = "keep"
    container: Container = "safetensors"
    max_shard_size: int = DEFAULT_SHARD_SIZE
    overwrite: bool = False
    weights_only: bool = False
    verify: VerifyMode = "full"
    check_replicas: bool = False
    tie_embeddings: bool | None = None
    value_model: bool = False
    attention_heads: int | None = None
    key_value_heads: int | None = None
    fuse_lora: bool = False
    adapter_only: bool = False
    lora_alpha: float | None = None
    shapes_from: Path | None = None
    repair_index: bool = False
    model_key: str | None = None
    weights: Weights | None = None
    fill_from: Path | None = None
    parallel: Mapping[str, int] = field(default_factory=dict)
    backend: str | None = None
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        """Raise UsageError for words and sizes that mean nothing."""
        chosen = {"dtype": DTYPE_CHOICES, "container": CONTAINERS, "verify": VERIFY_MODES}
        if self.weights is not None:
            chosen["weights"] = WEIGHTS_CHOICES
        for name, choices in chosen.items():
            if getattr(self, name) not in choices:
                raise UsageError(f"{name} is {getattr(self, name)!r}, which is none of {', '.join(choices)}")
        check_sizes(self.parallel)
