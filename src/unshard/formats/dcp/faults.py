"""What is wrong with the pieces of tensors, gathered so that a thousand pieces of one fault make one error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from unshard.errors import FormatError, IncompleteError, UnshardError
from unshard.tensors import SourceFile
from unshard.words import count_in_words, items_in_lines, items_in_words, names_in_words

_LISTED = 20
_ALSO = "if the files of the other ranks lie elsewhere, add their folder: --also DIR"
_COPY = "copy the files again, or take an earlier checkpoint"


@dataclass(slots=True)
class Faults:
    """The faults by kind. Dicts and lists name tensors; keys of dicts are what they have in common.

    missing:     files that are not there.
    short:       files that end before the pieces do, by name and size.
    unplaced:    pieces that the metadata give no place.
    unheld:      element types that safetensors cannot hold.
    transformed: ways of writing that are not undone, and what to do about it.
    retyped:     what is recorded and what is stored, where they are two types; the tensors, each with a file of it.
    reshaped:    pieces of another shape than is recorded.
    damaged:     pieces that cannot be read at all.
    """

    missing: dict[str, set[str]] = field(default_factory=dict)
    short: dict[tuple[SourceFile, int], set[str]] = field(default_factory=dict)
    unplaced: dict[str, int] = field(default_factory=dict)
    unheld: dict[str, list[str]] = field(default_factory=dict)
    transformed: dict[tuple[str, str | None], list[str]] = field(default_factory=dict)
    retyped: dict[str, dict[str, SourceFile]] = field(default_factory=dict)
    reshaped: dict[str, str] = field(default_factory=dict)
    damaged: list[FormatError] = field(default_factory=list)

    def problems(self) -> Iterator[UnshardError]:
        """One error per kind; of damaged pieces, the first ones' own."""
        if self.missing:
            yield self._missing()
        for (file, size), names in sorted(self.short.items(), key=str):
            text = f"{file}: ends at byte {size:,}, before the pieces of {_tensors(names)}"
            yield FormatError(text, hint=f"the file was truncated: {_COPY}")
        if self.unplaced:
            lines = [f"{name}: {count_in_words(count, 'piece')}" for name, count in self.unplaced.items()]
            text = f"the metadata do not say where pieces were written:\n{items_in_lines(lines, _LISTED)}"
            yield IncompleteError(text, hint=_COPY)
        for dtype, held in self.unheld.items():
            yield FormatError(f"elements of type {dtype}, which safetensors cannot hold: {_tensors(held)}")
        for (how, hint), held in self.transformed.items():
            yield FormatError(f"{how}: {_tensors(held)}", hint=hint)
        for types, files in self.retyped.items():
            there = items_in_words(sorted({str(file) for file in files.values()}))
            yield FormatError(f"the metadata record {types}: {_tensors([*files])}, in {there}", hint=_COPY)
        if self.reshaped:
            lines = [f"{name}: {what}" for name, what in self.reshaped.items()]
            text = f"pieces have other shapes than the metadata record:\n{items_in_lines(lines, _LISTED)}"
            yield IncompleteError(text, hint=_COPY)
        yield from self.damaged[:_LISTED]
        if len(self.damaged) > _LISTED:
            yield FormatError(f"{len(self.damaged) - _LISTED:,} more pieces cannot be read", hint=_COPY)

    def _missing(self) -> IncompleteError:
        holed = set().union(*self.missing.values())
        lines = [f"{file} (pieces of {count_in_words(len(names), 'tensor')})" for file, names in self.missing.items()]
        files, are = count_in_words(len(lines), "file"), "is" if len(lines) == 1 else "are"
        text = f"{files} that the metadata name {are} missing: holes in {count_in_words(len(holed), 'tensor')}"
        text += ":\n" + items_in_lines(lines, len(lines))
        return IncompleteError(text, hint=_ALSO)


def _tensors(names: set[str] | list[str]) -> str:
    unique = sorted(set(names))
    return f"{count_in_words(len(unique), 'tensor')} ({names_in_words(unique)})"
