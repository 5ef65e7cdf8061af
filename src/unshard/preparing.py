"""What will become of a checkpoint: opened, named, laid out and planned, before the first byte moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from unshard import adapters, families
from unshard.checkpoint import Checkpoint, Note
from unshard.errors import ModelError, UsageError, raise_all
from unshard.formats.huggingface.target import lay_out
from unshard.mapping import read_map
from unshard.model import Model
from unshard.opening import open_checkpoint, open_reference
from unshard.options import MergeOptions
from unshard.plan.compiler import compile_plan
from unshard.plan.moves import Plan
from unshard.target import Target
from unshard.tensors import Computed, Value
from unshard.wrappers import strip_all


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a checkpoint: the model with its adapters, and the files they are laid out in.

    checkpoint: under the names of transformers.
    """

    checkpoint: Checkpoint
    model: Model
    target: Target
    notes: tuple[Note, ...]


@dataclass(frozen=True, slots=True)
class Preparation:
    """Everything that is known before the first byte moves."""

    checkpoint: Checkpoint
    decision: Decision
    plan: Plan


def prepare(source: Path, options: MergeOptions) -> Preparation:
    """Open a checkpoint and plan its merge. Raises all that is wrong, at once."""
    checkpoint = open_checkpoint(source, options)
    raise_all(checkpoint.problems)
    decision = decide(checkpoint, options)
    return Preparation(checkpoint, decision, compile_plan(decision.target, check_replicas=options.check_replicas))


def decide(checkpoint: Checkpoint, options: MergeOptions) -> Decision:
    """Name the tensors of a checkpoint that has no problems of its own, and lay them out. Raises all that is wrong."""
    checkpoint, computed = translate(checkpoint, options)
    split = split_adapters(checkpoint, options)
    problems, notes = list(split.problems), [*checkpoint.notes, *split.notes]
    base: Mapping[str, Value] = {} if options.adapter_only else split.base
    written = split.adapters
    if options.fuse_lora:
        fused = adapters.fuse_all(split)
        base, written = fused.tensors, ()
        problems += fused.problems
        notes += fused.notes
    base = {**base, **computed} if base else {}
    if options.adapter_only and not split.adapters:
        problems.append(UsageError("the checkpoint holds no LoRA adapter", hint="leave `--adapter-only` out"))
    reference = open_reference(Path(options.names)) if options.names not in ("hub", "stored") else None
    model = families.name_model(base, checkpoint.config, options, reference) if base else Model({})
    raise_all([*problems, *model.problems])
    target = lay_out(model, checkpoint, options, written)
    return Decision(checkpoint, model, target, (*notes, *target.notes))


def translate(checkpoint: Checkpoint, options: MergeOptions) -> tuple[Checkpoint, Mapping[str, Computed]]:
    """The checkpoint under the names of transformers, and those of its tensors whose values had to be computed.

    Raises all that is wrong. Stored names stay where the user wants them.
    """
    if checkpoint.dialect == "huggingface" or options.weights_only or options.names == "stored":
        return checkpoint, {}
    if checkpoint.config is None:
        raise ModelError(
            "there is no config.json, so that nothing tells which model this is",
            hint="give the model's own with --config DIR, or write Megatron's names with --weights-only",
        )
    rules = read_map(options.map).rules if options.map else ()
    translation = families.translate(checkpoint, checkpoint.config, rules)
    raise_all(translation.problems)
    notes = (*checkpoint.notes, *translation.notes)
    return replace(checkpoint, tensors=translation.tensors, notes=notes, dialect="huggingface"), translation.computed


def split_adapters(checkpoint: Checkpoint, options: MergeOptions) -> adapters.Split:
    """The base model and the adapters; without adapters, the base model is the checkpoint as it is stored."""
    split = adapters.split(checkpoint, strip_all(checkpoint.tensors), options)
    return split if split.adapters or split.problems else replace(split, base=checkpoint.tensors)
