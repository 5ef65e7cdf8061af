"""What `verify` and `test` show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from unshard.report.render import plain_console, print_facts, print_notes
from unshard.report.report import note_to_json
from unshard.report.words import bytes_in_words, count_in_words, names_in_words
from unshard.verify.against import Verdict
from unshard.verify.compare import Comparison, TensorComparison

SHOWN = 20
"""Lines of failures that are shown without `--verbose`."""


def verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    """The verdict as JSON values, with a line for every tensor that was compared."""
    comparison = verdict.comparison
    values: dict[str, Any] = {
        "holds": verdict.holds,
        "output": verdict.output,
        "against": verdict.against,
        "family": verdict.family,
        "tensors": verdict.tensors,
        "bytes": verdict.size,
        "notes": [note_to_json(note) for note in verdict.notes],
    }
    if comparison is not None:
        values["comparison"] = {
            "bytes": comparison.size,
            "only_in_output": list(comparison.only_left),
            "only_in_against": list(comparison.only_right),
            "tensors": [_tensor_to_json(tensor) for tensor in comparison.tensors],
        }
    return values


def _tensor_to_json(tensor: TensorComparison) -> dict[str, Any]:
    return {
        "tensor": tensor.name,
        "shapes": [list(shape) for shape in tensor.shapes],
        "dtypes": list(tensor.dtypes),
        "identical": tensor.identical,
        "max_difference": tensor.max_difference,
        "cosine": tensor.cosine,
        "failure": tensor.reason or None,
    }


def print_verdict(verdict: Verdict, *, verbose: bool) -> None:
    """The verdict for people: coverage first, then the tensors that differ; with `verbose` all of them."""
    from rich.text import Text

    console = plain_console()
    print_facts(console, _facts(verdict))
    print_notes(console, verdict.notes, verbose=verbose)
    comparison = verdict.comparison
    if comparison is None:
        console.print(
            Text("structure holds; contents were not compared: give `--against` a source or a model", "green")
        )
        return
    lines = [tensor for tensor in comparison.tensors if verbose or not tensor.identical]
    for tensor in lines[: None if verbose else SHOWN]:
        style = "red" if tensor.reason else "default"
        console.print(Text(_line(tensor), style=style))
    if not verbose and len(lines) > SHOWN:
        console.print(Text(f"… and {len(lines) - SHOWN} more; `--verbose` shows all", style="dim"))
    console.print(Text(_verdict_line(comparison), style="bold green" if verdict.holds else "bold red"))


def _line(tensor: TensorComparison) -> str:
    mark = "x" if tensor.reason else "+"
    dtypes = tensor.dtypes[0] if tensor.dtypes[0] == tensor.dtypes[1] else " and ".join(tensor.dtypes)
    if tensor.max_difference is None or tensor.cosine is None:
        return f" {mark} {tensor.name}: {tensor.reason}"
    figures = f"max difference {tensor.max_difference:.3g}, cosine {tensor.cosine:.7f}"
    return f" {mark} {tensor.name}  {dtypes} {list(tensor.shapes[0])}  {figures}" + (
        f": {tensor.reason}" if tensor.reason else ""
    )


def _facts(verdict: Verdict) -> Iterator[tuple[str, str]]:
    yield "checked", f"{verdict.output} ({verdict.tensors:,} tensors, {bytes_in_words(verdict.size)})"
    yield "model", verdict.family or "unknown to unshard: names were not checked against an architecture"
    comparison = verdict.comparison
    if comparison is None:
        return
    yield "against", str(verdict.against)
    yield "names", f"{len(comparison.tensors):,} on both sides"
    if comparison.only_left:
        yield "only checked", f"{len(comparison.only_left):,}: {names_in_words(comparison.only_left)}"
    if comparison.only_right:
        yield "only against", f"{len(comparison.only_right):,}: {names_in_words(comparison.only_right)}"


def _verdict_line(comparison: Comparison) -> str:
    identical = sum(tensor.identical for tensor in comparison.tensors)
    compared = f"{identical:,} of {count_in_words(len(comparison.tensors), 'tensor')} identical"
    if comparison.holds:
        return f"equal: {compared}" + ("" if comparison.tolerance.is_exact else ", the others within the tolerance")
    failed = len(comparison.failures) + len(comparison.only_left) + len(comparison.only_right)
    return f"not equal: {compared}, {count_in_words(failed, 'failure')}"
