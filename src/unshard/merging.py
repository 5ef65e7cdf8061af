"""A merge from end to end: open, name, lay out, plan, run, verify, report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

from unshard import adapters, families
from unshard.checkpoint import Checkpoint, Note
from unshard.errors import UsageError, raise_all
from unshard.formats.huggingface.target import lay_out
from unshard.model import Adapter, Model
from unshard.opening import open_checkpoint, open_reference
from unshard.options import MergeOptions
from unshard.plan.compiler import compile_plan
from unshard.plan.moves import Plan
from unshard.report.events import Sink, ignore
from unshard.report.report import Report, Rounded, peak_memory
from unshard.run.results import Rounding
from unshard.target import Target
from unshard.tensors import Computed, Tensor, Value
from unshard.wrappers import strip_all


@dataclass(frozen=True, slots=True)
class Preparation:
    """Everything that is known before the first byte moves."""

    checkpoint: Checkpoint
    model: Model
    adapters: tuple[Adapter, ...]
    target: Target
    plan: Plan
    notes: tuple[Note, ...]


def prepare(source: Path, options: MergeOptions) -> Preparation:
    """Open a checkpoint and plan its merge. Raises all that is wrong, at once."""
    checkpoint = open_checkpoint(source, options)
    raise_all(checkpoint.problems)
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
        problems.append(UsageError(f"`{source}` holds no LoRA adapter", hint="leave `--adapter-only` out"))
    reference = open_reference(Path(options.names)) if options.names not in ("hub", "stored") else None
    model = families.name_model(base, checkpoint.config, options, reference) if base else Model({})
    raise_all([*problems, *model.problems])
    target = lay_out(model, checkpoint, options, written)
    plan = compile_plan(target, check_replicas=options.check_replicas)
    return Preparation(checkpoint, model, written, target, plan, (*notes, *target.notes))


def split_adapters(checkpoint: Checkpoint, options: MergeOptions) -> adapters.Split:
    """The base model and the adapters; without adapters, the base model is the checkpoint as it is stored."""
    split = adapters.split(checkpoint, strip_all(checkpoint.tensors), options)
    return split if split.adapters or split.problems else replace(split, base=checkpoint.tensors)


def merge(source: Path, output: Path, options: MergeOptions | None = None, sink: Sink = ignore) -> Report:
    """Write the Hugging Face model of a checkpoint to `output`, verify it, and report.

    Raises an UnshardError for everything that a person can mend; then nothing that looks whole is left behind.
    """
    from unshard.run.local import run_plan
    from unshard.verify.output import verify_output

    options, started = options or MergeOptions(), monotonic()
    prepared = prepare(source, options)
    result = run_plan(prepared.plan, output, options.settings, sink, overwrite=options.overwrite)
    verification = verify_output(prepared.target, output, prepared.model.family, options, sink)
    values = prepared.target.weights
    return Report(
        source=str(source),
        output=str(output),
        checkpoint=prepared.checkpoint.title,
        family=prepared.model.family,
        tensors=len(values),
        parameters=sum(value.size * value.dtype.packed for value in values),
        size=prepared.plan.size,
        files=tuple([(file.path, file.size) for file in prepared.plan.files]),
        seconds=monotonic() - started,
        write_seconds=result.seconds,
        peak_memory=peak_memory(),
        verification=verification,
        notes=prepared.notes,
        rounded=tuple(_list_rounded(values, result.rounded)),
        dropped=prepared.model.dropped,
        skipped=prepared.checkpoint.skipped,
    )


def _list_rounded(values: Sequence[Value], counts: Mapping[str, Rounding]) -> Iterator[Rounded]:
    """The tensors whose values are not those that are stored, with what became of special values."""
    for value in values:
        if isinstance(value, Tensor) and not value.is_cast:
            continue
        stored = value.inputs[0].chunks if isinstance(value, Computed) else value.chunks
        found = counts.get(value.name, Rounding())
        source = stored[0].extent.dtype.name if stored else value.dtype.name
        yield Rounded(value.name, source, value.dtype.name, value.size, found.nan, found.overflow)
