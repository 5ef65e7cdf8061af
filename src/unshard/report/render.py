"""The report of a merge, for people. It ends with the figures and with what was and was not proven."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from unshard.checkpoint import Note
from unshard.options import Weights
from unshard.report.console import print_facts, print_line, print_table, print_title
from unshard.report.report import Report
from unshard.words import bytes_in_words, count_in_words, names_in_words, one_line, seconds_in_words

if TYPE_CHECKING:
    from rich.console import Console

SHOWN_NAMES = 3
"""Tensors that a note names without `--verbose`."""
SHOWN_FILES = 12
"""Files that the report lists without `--verbose`."""

WEIGHTS_IN_WORDS: Mapping[Weights, str] = {
    "master": "the optimizer's fp32 masters",
    "model": "the model's own, in the precision that training computed in",
}
"""Which of two copies of the parameters was taken."""

UNKNOWN_MODEL = "unknown: names were not checked against an architecture"


def print_report(console: Console, report: Report, *, verbose: bool) -> None:
    """All of it; with `verbose` every tensor that a note is about, and every file."""
    print_line(console, (f"Merged into {report.output}", "bold green"))
    print_facts(console, _origin(report))
    print_title(console, "Files")
    print_table(console, _files(report.files, None if verbose else SHOWN_FILES))
    notes = (*report.notes, *_derived_notes(report))
    if notes:
        print_title(console, "Notes")
        print_notes(console, notes, verbose=verbose)
    print_title(console, "Figures")
    print_facts(console, _figures(report))
    print_title(console, "Proven")
    print_findings(console, report.verification.proven, report.verification.unproven)


def print_notes(console: Console, notes: Iterable[Note], *, verbose: bool) -> None:
    """One line per note, and one with the tensors it is about; with `verbose` all of these."""
    for note in notes:
        mark, style = ("!", "yellow") if note.level == "warning" else ("-", "dim")
        print_line(console, (f" {mark} ", style), note.text)
        if note.tensors:
            most = len(note.tensors) if verbose else SHOWN_NAMES
            print_line(console, ("   " + names_in_words(note.tensors, most), "dim"))


def print_findings(console: Console, proven: Iterable[str], unproven: Iterable[str]) -> None:
    """What was proven, then what was not."""
    for sentence in proven:
        print_line(console, (" + ", "green"), sentence)
    for sentence in unproven:
        print_line(console, (" ? not proven: ", "yellow"), sentence)


def model_in_words(family: str | None, *, is_adapter: bool) -> str:
    """What kind of model it is, as far as unshard knows."""
    return family or ("a PEFT adapter, without a base model" if is_adapter else UNKNOWN_MODEL)


def _origin(report: Report) -> Iterator[tuple[str, str]]:
    yield "from", f"{report.source} ({report.checkpoint})"
    yield "model", model_in_words(report.family, is_adapter=report.is_adapter)
    yield "tensors", f"{report.tensors:,} ({report.parameters:,} parameters)"
    if report.weights:
        yield "weights", WEIGHTS_IN_WORDS[report.weights]


def _files(files: Sequence[tuple[str, int]], most: int | None) -> Iterator[tuple[str, str]]:
    width = max([len(bytes_in_words(size)) for _, size in files])
    for path, size in files[:most]:
        yield bytes_in_words(size).rjust(width), one_line(path)
    if most is not None and len(files) > most:
        yield "…".rjust(width), f"and {len(files) - most:,} more; `--verbose` lists all"


def _figures(report: Report) -> Iterator[tuple[str, str]]:
    yield "written", f"{bytes_in_words(report.size)} in {count_in_words(len(report.files), 'file')}"
    writing, verifying = seconds_in_words(report.write_seconds), seconds_in_words(report.verification.seconds)
    yield "time", f"{seconds_in_words(report.seconds)}: writing {writing}, verifying {verifying}"
    yield "rate", f"{bytes_in_words(report.rate)}/s written"
    yield "memory", f"{bytes_in_words(report.peak_memory)} at the peak"


def _derived_notes(report: Report) -> Iterator[Note]:
    """What the figures of the report say beside the notes: casts, tensors and entries that were left out."""
    pairs = sorted({(entry.source, entry.result) for entry in report.rounded if entry.source != entry.result})
    for source, result in pairs:
        names = tuple([entry.name for entry in report.rounded if (entry.source, entry.result) == (source, result)])
        yield Note(f"{count_in_words(len(names), 'tensor')} went from {source} to {result}", names)
    special = [entry for entry in report.rounded if entry.nan or entry.overflow]
    if special:
        nan, overflow = sum(entry.nan for entry in special), sum(entry.overflow for entry in special)
        text = f"rounded values hold {nan:,} NaN; {overflow:,} finite values became infinite"
        yield Note(text, tuple([entry.name for entry in special]), "warning")
    yield from describe_dropped(report.dropped)
    if report.skipped:
        count = count_in_words(len(report.skipped), "entry", "entries")
        yield Note(f"left out of the state dict, being no tensors: {count}", tuple(report.skipped))


def describe_dropped(dropped: Mapping[str, str]) -> Iterator[Note]:
    """A note for every reason why stored tensors are not in the output."""
    for reason in dict.fromkeys(dropped.values()):
        names = tuple([name for name, why in dropped.items() if why == reason])
        yield Note(f"{count_in_words(len(names), 'tensor')} left out: {reason}", names)
