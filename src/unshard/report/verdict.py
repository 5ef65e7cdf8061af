"""What `verify` and `test` show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

from unshard.report.console import print_facts, print_line, print_table, print_title
from unshard.report.render import model_in_words, print_findings, print_notes
from unshard.report.report import note_to_json
from unshard.verify.against import Verdict
from unshard.verify.compare import Comparison, TensorComparison
from unshard.words import bytes_in_words, count_in_words, names_in_words

if TYPE_CHECKING:
    from rich.console import Console

SHOWN = 20
"""Tensors that differ and are shown without `--verbose`."""


def verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    """The verdict as JSON values, with an object for every tensor that was compared.

    A figure that is not finite (a difference between a number and NaN) is a string: "inf", "nan".
    """
    comparison = verdict.comparison
    values: dict[str, Any] = {
        "holds": verdict.holds,
        "output": verdict.output,
        "against": verdict.against,
        "family": verdict.family,
        "tensors": verdict.tensors,
        "bytes": verdict.size,
        "proven": list(verdict.proven),
        "not_proven": list(verdict.unproven),
        "hint": verdict.hint,
        "notes": [note_to_json(note) for note in verdict.notes],
        "comparison": None,
    }
    if comparison is not None:
        values["comparison"] = {
            "bytes": comparison.size,
            "seconds": round(comparison.seconds, 3),
            "only_in_output": list(comparison.only_left),
            "only_in_against": list(comparison.only_right),
            "settings": [
                {"file": setting.file, "key": setting.key, "output": setting.left, "against": setting.right}
                for setting in comparison.settings
            ],
            "tensors": [_tensor_to_json(tensor) for tensor in comparison.tensors],
        }
    return values


def _tensor_to_json(tensor: TensorComparison) -> dict[str, Any]:
    return {
        "tensor": tensor.name,
        "shapes": [list(shape) for shape in tensor.shapes],
        "dtypes": list(tensor.dtypes),
        "identical": tensor.identical,
        "max_difference": _figure_to_json(tensor.max_difference),
        "cosine": _figure_to_json(tensor.cosine),
        "failure": tensor.reason or None,
    }


def _figure_to_json(figure: float | None) -> float | str | None:
    return figure if figure is None or isfinite(figure) else str(figure)


def print_verdict(console: Console, verdict: Verdict, *, verbose: bool) -> None:
    """The verdict for people: coverage first, then the tensors that differ; with `verbose` all of them."""
    comparison = verdict.comparison
    print_facts(console, _facts(verdict))
    notes = [note for note in verdict.notes if verbose or note.level == "warning"]
    if notes:
        print_title(console, "Notes")
        print_notes(console, notes, verbose=verbose)
    if comparison is not None:
        _print_differences(console, comparison, verbose=verbose)
    print_title(console, "Proven")
    print_findings(console, verdict.proven, verdict.unproven)
    if comparison is not None:
        console.print()
        style = "bold green" if verdict.holds else "bold red"
        print_line(console, (_conclude(comparison), style))


def _print_differences(console: Console, comparison: Comparison, *, verbose: bool) -> None:
    names = (*comparison.only_left, *comparison.only_right)
    shown = [tensor for tensor in comparison.tensors if verbose or not tensor.identical]
    if names:
        print_title(console, "Names on one side only")
        rows = [(_ONLY_LEFT, name) for name in comparison.only_left]
        rows += [(_ONLY_RIGHT, name) for name in comparison.only_right]
        _print_some(console, rows, ["red"] * len(rows), verbose=verbose)
    if comparison.settings:
        print_title(console, "Settings that differ")
        settings = [
            (setting.file, setting.key, f"{setting.left} and {setting.right}") for setting in comparison.settings
        ]
        print_table(console, settings, ["red"] * len(settings))
    if shown:
        print_title(console, "Tensors" if verbose else "Tensors that differ")
        styles = ["red" if tensor.reason else "" for tensor in shown]
        _print_some(console, [_row(tensor) for tensor in shown], styles, verbose=verbose)


_ONLY_LEFT, _ONLY_RIGHT = "only checked", "only against"


def _print_some(console: Console, rows: Sequence[tuple[str, ...]], styles: Sequence[str], *, verbose: bool) -> None:
    most = len(rows) if verbose else SHOWN
    print_table(console, rows[:most], styles[:most])
    if len(rows) > most:
        print_line(console, (f"  … and {len(rows) - most:,} more; `--verbose` shows all", "dim"))


def _row(tensor: TensorComparison) -> tuple[str, ...]:
    """Name, types, shapes, figures, and why it does not count as equal."""
    dtypes = " and ".join(dict.fromkeys(tensor.dtypes))
    shapes = " and ".join(dict.fromkeys(str(list(shape)) for shape in tensor.shapes))
    if tensor.max_difference is None or tensor.cosine is None:
        return tensor.name, dtypes, shapes, "", "", tensor.reason
    difference = f"max difference {tensor.max_difference:.3g}"
    return tensor.name, dtypes, shapes, difference, f"cosine {tensor.cosine:.7f}", tensor.reason or _praise(tensor)


def _praise(tensor: TensorComparison) -> str:
    return "identical" if tensor.identical else "within the tolerance"


def _facts(verdict: Verdict) -> Iterator[tuple[str, str]]:
    yield "checked", f"{verdict.output} ({count_in_words(verdict.tensors, 'tensor')}, {bytes_in_words(verdict.size)})"
    yield "model", model_in_words(verdict.family, is_adapter=verdict.is_adapter)
    comparison = verdict.comparison
    if comparison is None:
        return
    yield "against", str(verdict.against)
    yield "names", f"{len(comparison.tensors):,} on both sides"
    if comparison.only_left:
        yield _ONLY_LEFT, f"{len(comparison.only_left):,}: {names_in_words(comparison.only_left)}"
    if comparison.only_right:
        yield _ONLY_RIGHT, f"{len(comparison.only_right):,}: {names_in_words(comparison.only_right)}"


def _conclude(comparison: Comparison) -> str:
    identical = sum(tensor.identical for tensor in comparison.tensors)
    compared = f"{identical:,} of {count_in_words(len(comparison.tensors), 'tensor')} identical"
    if comparison.holds:
        return f"equal: {compared}" + ("" if comparison.tolerance.is_exact else ", the others within the tolerance")
    return f"not equal: {compared}, {count_in_words(comparison.differences, 'difference')}"
