"""A merge from end to end: open, name, lay out, plan, run, verify, report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from threading import Thread
from time import monotonic

from unshard import adapters, families
from unshard.checkpoint import Checkpoint, Note
from unshard.errors import UsageError, VerificationError, raise_all
from unshard.formats.huggingface.target import lay_out
from unshard.model import Model
from unshard.opening import open_checkpoint, open_reference
from unshard.options import MergeOptions
from unshard.plan.compiler import compile_plan
from unshard.plan.moves import Plan
from unshard.report.events import Sink, ignore
from unshard.report.report import Report, Rounded, Verification, peak_memory
from unshard.run.results import Rounding
from unshard.target import Target
from unshard.tensors import Computed, Tensor, Value
from unshard.wrappers import strip_all


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a checkpoint: the model with its adapters, and the files they are laid out in."""

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
    split = split_adapters(checkpoint, options)
    problems, notes = list(split.problems), [*checkpoint.notes, *split.notes]
    base: Mapping[str, Value] = {} if options.adapter_only else split.base
    written = split.adapters
    if options.fuse_lora:
        fused = adapters.fuse_all(split)
        base, written = fused.tensors, ()
        problems += fused.problems
        notes += fused.notes
    if options.adapter_only and not split.adapters:
        problems.append(UsageError("the checkpoint holds no LoRA adapter", hint="leave `--adapter-only` out"))
    reference = open_reference(Path(options.names)) if options.names not in ("hub", "stored") else None
    model = families.name_model(base, checkpoint.config, options, reference) if base else Model({})
    raise_all([*problems, *model.problems])
    target = lay_out(model, checkpoint, options, written)
    return Decision(model, target, (*notes, *target.notes))


def split_adapters(checkpoint: Checkpoint, options: MergeOptions) -> adapters.Split:
    """The base model and the adapters; without adapters, the base model is the checkpoint as it is stored."""
    split = adapters.split(checkpoint, strip_all(checkpoint.tensors), options)
    return split if split.adapters or split.problems else replace(split, base=checkpoint.tensors)


def merge(source: Path, output: Path, options: MergeOptions | None = None, sink: Sink = ignore) -> Report:
    """Write the Hugging Face model of a checkpoint to `output`, verify it, and report.

    Raises an UnshardError for everything that a person can mend; then nothing that looks whole is left behind.
    """
    from unshard.run.local import run_plan

    options, started = options or MergeOptions(), monotonic()
    prepared = prepare(source, options)
    model, target = prepared.decision.model, prepared.decision.target
    Thread(target=_load_ahead, name="load", daemon=True).start()
    result = run_plan(prepared.plan, output, options.settings, sink, overwrite=options.overwrite)
    verification = _verify(prepared, output, options, sink)
    return Report(
        source=str(source),
        output=str(output),
        checkpoint=prepared.checkpoint.title,
        family=model.family,
        is_adapter=target.is_adapter,
        tensors=len(target.weights),
        parameters=sum(value.size * value.dtype.packed for value in target.weights),
        size=prepared.plan.size,
        files=tuple([(file.path, file.size) for file in prepared.plan.files]),
        seconds=monotonic() - started,
        write_seconds=result.seconds,
        peak_memory=peak_memory(),
        verification=verification,
        notes=prepared.decision.notes,
        rounded=tuple(_list_rounded(target.weights, result.rounded)),
        dropped=model.dropped,
        skipped=prepared.checkpoint.skipped,
    )


def _load_ahead() -> None:
    """Load what is needed only after the writing, while the kernel copies: a fifth of a small model's time."""
    for name in ("numpy", "safetensors", "unshard.verify.output", "rich.console"):
        import_module(name)


def _verify(prepared: Preparation, output: Path, options: MergeOptions, sink: Sink) -> Verification:
    """Read the output again. What turns out to be wrong is made unloadable before the error is told."""
    from unshard.run.publish import withdraw
    from unshard.verify.output import verify_output

    decision = prepared.decision
    try:
        return verify_output(decision.target, output, decision.model.family, options, sink)
    except VerificationError as error:
        renamed = ", ".join([f"`{path}`" for path in withdraw(output, prepared.plan.files)])
        message = f"{error.message}\nSo that nobody loads it, it was renamed: {renamed}"
        raise VerificationError(message, hint=error.hint or "check the disk, then merge again") from error


def _list_rounded(values: Sequence[Value], counts: Mapping[str, Rounding]) -> Iterator[Rounded]:
    """The tensors whose values are not those that are stored, with what became of special values."""
    for value in values:
        if isinstance(value, Tensor) and not value.is_cast:
            continue
        stored = value.inputs[0].chunks if isinstance(value, Computed) else value.chunks
        found = counts.get(value.name, Rounding())
        source = stored[0].extent.dtype.name if stored else value.dtype.name
        yield Rounded(value.name, source, value.dtype.name, value.size, found.nan, found.overflow)
