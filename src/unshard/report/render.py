"""The report on a terminal, or in a file when stdout is one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from unshard.checkpoint import Note
from unshard.report.report import Report
from unshard.report.words import bytes_in_words, count_in_words, names_in_words, seconds_in_words

if TYPE_CHECKING:
    from rich.console import Console


def plain_console() -> Console:
    """A console on stdout that breaks no lines where stdout is a file or a pipe."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def print_facts(console: Console, facts: Iterable[tuple[str, str]]) -> None:
    """Two columns: what, and the figure."""
    from rich.text import Text

    rows = list(facts)
    width = max([len(name) for name, _ in rows], default=0)
    for name, value in rows:
        console.print(Text(name.ljust(width), style="bold").append(f"  {value}", style="default not bold"))


def print_notes(console: Console, notes: tuple[Note, ...], *, verbose: bool) -> None:
    """One line per note; with `verbose` every tensor it is about."""
    from rich.text import Text

    for note in notes:
        mark, style = ("!", "yellow") if note.level == "warning" else ("-", "dim")
        console.print(Text(f" {mark} ", style=style).append(note.text, style="default not dim"))
        if note.tensors:
            most = len(note.tensors) if verbose else 3
            console.print(Text("   " + names_in_words(note.tensors, most), style="dim"))


def print_report(report: Report, *, verbose: bool) -> None:
    """The report of a merge, for people."""
    from rich.text import Text

    console = plain_console()
    console.print(Text(f"Merged into {report.output}", style="bold green"))
    print_facts(console, _facts(report))
    notes = (*report.notes, *_derived_notes(report))
    if notes:
        console.print(Text("\nNotes", style="bold"))
        print_notes(console, notes, verbose=verbose)
    console.print(Text("\nProven", style="bold"))
    for sentence in report.verification.proven:
        console.print(Text(" + ", style="green").append(sentence, style="default"))
    for sentence in report.verification.unproven:
        console.print(Text(" ? not proven: ", style="yellow").append(sentence, style="default"))


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    yield "from", f"{report.source} ({report.checkpoint})"
    yield "model", report.family or "unknown to unshard: names were not checked against an architecture"
    yield "tensors", f"{report.tensors:,} ({report.parameters:,} parameters)"
    yield "written", f"{bytes_in_words(report.size)} in {count_in_words(len(report.files), 'file')}"
    yield (
        "time",
        (
            f"{seconds_in_words(report.seconds)} in all; writing {seconds_in_words(report.write_seconds)}"
            f" ({bytes_in_words(report.rate)}/s), verifying {seconds_in_words(report.verification.seconds)}"
        ),
    )
    yield "memory", f"{bytes_in_words(report.peak_memory)} at the peak"


def _derived_notes(report: Report) -> Iterator[Note]:
    pairs = Counter((entry.source, entry.result) for entry in report.rounded)
    for (source, result), number in sorted(pairs.items()):
        names = tuple([entry.name for entry in report.rounded if (entry.source, entry.result) == (source, result)])
        yield Note(f"{count_in_words(number, 'tensor')} went from {source} to {result}", names)
    special = [entry for entry in report.rounded if entry.nan or entry.overflow]
    if special:
        nan, overflow = sum(entry.nan for entry in special), sum(entry.overflow for entry in special)
        text = f"rounded values hold {nan:,} NaN; {overflow:,} finite values became infinite"
        yield Note(text, tuple([entry.name for entry in special]), "warning")
    for reason in dict.fromkeys(report.dropped.values()):
        names = tuple([name for name, why in report.dropped.items() if why == reason])
        yield Note(f"{count_in_words(len(names), 'tensor')} left out: {reason}", names)
    if report.skipped:
        count = count_in_words(len(report.skipped), "entry", "entries")
        yield Note(f"left out of the state dict, being no tensors: {count}", tuple(report.skipped))
