"""A merge from end to end: prepared, run, verified, reported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Thread
from time import monotonic

from unshard.errors import UnshardError, VerificationError
from unshard.options import MergeOptions
from unshard.preparing import Preparation, prepare
from unshard.report.events import Sink, ignore
from unshard.report.report import Report, Rounded, Verification, peak_memory
from unshard.run.results import Rounding
from unshard.tensors import Computed, Tensor, Value


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
        weights=prepared.checkpoint.weights,
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
    """Load what is needed only after the writing, while the kernel copies: a fifth of a small model's time.

    What cannot be loaded is told where it is needed.
    """
    for name in ("numpy", "safetensors", "unshard.verify.output", "rich.console"):
        with suppress(Exception):
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
    except UnshardError as error:
        message = f"{error.message}\nThe model in `{output}` is complete, but could not be verified"
        raise type(error)(message, hint=error.hint) from error


def _list_rounded(values: Sequence[Value], counts: Mapping[str, Rounding]) -> Iterator[Rounded]:
    """The tensors whose values are not those that are stored, with what became of special values."""
    for value in values:
        if isinstance(value, Tensor) and not value.is_cast:
            continue
        stored = value.inputs[0].chunks if isinstance(value, Computed) else value.chunks
        found = counts.get(value.name, Rounding())
        source = stored[0].extent.dtype.name if stored else value.dtype.name
        yield Rounded(value.name, source, value.dtype.name, value.size, found.nan, found.overflow)
