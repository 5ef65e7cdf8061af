"""What will become of a checkpoint: opened, named, laid out and planned, before the first byte moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from unshard import adapters, families
from unshard.checkpoint import Checkpoint, Note
from unshard.collector import collector_paused
from unshard.errors import UnshardError, UsageError, merge_command, raise_all
from unshard.filling import fuse, open_base, widen
from unshard.formats.huggingface.target import lay_out
from unshard.model import Model
from unshard.opening import open_checkpoint, open_reference
from unshard.options import MergeOptions
from unshard.plan.compiler import compile_plan
from unshard.plan.moves import Plan
from unshard.target import Target
from unshard.tensors import Value
from unshard.translating import translate
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


@collector_paused()
def prepare(source: Path, options: MergeOptions) -> Preparation:
    """Open a checkpoint and plan its merge. Raises all that is wrong, at once."""
    checkpoint = open_checkpoint(source, options)
    raise_all(checkpoint.problems)
    decision = decide(checkpoint, options, str(source))
    return Preparation(checkpoint, decision, compile_plan(decision.target, check_replicas=options.check_replicas))


def decide(checkpoint: Checkpoint, options: MergeOptions, source: str = "SRC") -> Decision:
    """Name the tensors of a checkpoint that has no problems of its own, and lay them out. Raises all that is wrong.

    source: the checkpoint as it was typed, for hints.
    """
    checkpoint, filler = open_base(checkpoint, options)
    checkpoint, translation = translate(checkpoint, options, source)
    split = split_adapters(checkpoint, options)
    if filler is not None and checkpoint.weights == "master" and split.base:
        filler = widen(filler)
    as_peft = _split_as_running(checkpoint, options) if translation is not None and split.adapters else split
    problems, notes = list(as_peft.problems), [*checkpoint.notes, *as_peft.notes]
    base: Mapping[str, Value] = {} if options.adapter_only else split.base
    written = as_peft.adapters
    if options.fuse_lora:
        fused, filler = fuse(split, filler, checkpoint.config, in_file=translation is not None)
        base, written = fused.tensors, ()
        problems += fused.problems
        notes += fused.notes
    if base and translation is not None:
        base = {**base, **translation.computed}
    if options.adapter_only and not split.adapters:
        problems.append(UsageError("the checkpoint holds no LoRA adapter", hint="leave `--adapter-only` out"))
    reference = open_reference(Path(options.names), options) if options.names not in ("hub", "stored") else None
    excluded = adapters.strip_names(strip_all(checkpoint.excluded)) if split.adapters else checkpoint.excluded
    model = Model({})
    if base or filler is not None:
        model = families.name_model(
            base,
            checkpoint.config,
            options,
            reference,
            in_file=translation is not None,
            own=translation.own if translation else (),
            source=source,
            excluded=excluded,
            base=filler,
        )
    raise_all([*problems, *(_say_adapter_only(model.problems, source) if written else model.problems)])
    target = lay_out(model, checkpoint, options, written)
    return Decision(checkpoint, model, target, (*notes, *target.notes))


def _say_adapter_only(problems: Sequence[UnshardError], source: str) -> Sequence[UnshardError]:
    """What is wrong with the base model under an adapter; the last of it with the way out that needs no base model."""
    if not problems:
        return problems
    *others, last = problems
    way_out = f"to write the adapter alone: {merge_command(source, '--adapter-only')}"
    return [*others, type(last)(last.message, hint=f"{last.hint}\n{way_out}" if last.hint else way_out)]


def split_adapters(checkpoint: Checkpoint, options: MergeOptions) -> adapters.Split:
    """The base model and the adapters; without adapters, the base model is the checkpoint as it is stored."""
    split = adapters.split(checkpoint, strip_all(checkpoint.tensors), options)
    return split if split.adapters or split.problems else replace(split, base=checkpoint.tensors)


def _split_as_running(checkpoint: Checkpoint, options: MergeOptions) -> adapters.Split:
    """The same for a checkpoint whose names are those of the file: PEFT loads by the names of the running model.

    Where the base model is not there, its config tells which of its modules have no adapter.
    """
    running = families.name_as_running(checkpoint.tensors, checkpoint.config)
    outline = families.name_as_running(families.outline(checkpoint.config), checkpoint.config)
    return adapters.split(replace(checkpoint, tensors=running), running, options, outline)
