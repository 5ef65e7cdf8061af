"""Lines of styled text: colours on a terminal, plain text elsewhere and where NO_COLOR asks for it.

Everything that is printed may come from a stranger's file: it is data, never markup, and holds no control characters.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

from unshard.words import one_line, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def make_console(stream: TextIO) -> Console:
    """A console that breaks no lines, and that lets BrokenPipeError through."""
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    colours = {"color_system": None} if os.environ.get("NO_COLOR") else {}
    return Plain(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True, **colours)  # type: ignore[arg-type]


def styled(*parts: str | tuple[str, str]) -> Text:
    """A text from plain parts and (part, style) pairs."""
    from rich.text import Text

    text = Text()
    for part in parts:
        content, style = (part, "") if isinstance(part, str) else part
        text.append(printable(content), style=style or None)
    return text


def print_line(console: Console, *parts: str | tuple[str, str]) -> None:
    """One line (or more, where a part has line breaks)."""
    console.print(styled(*parts))


def print_title(console: Console, title: str) -> None:
    """The headline of a section, after an empty line."""
    console.print()
    print_line(console, (title, "bold"))


def print_facts(console: Console, facts: Iterable[tuple[str, str]]) -> None:
    """Two columns: what, and the figure."""
    rows = list(facts)
    width = max([len(name) for name, _ in rows], default=0)
    for name, value in rows:
        print_line(console, (name.ljust(width), "bold"), f"  {one_line(value)}")


def print_table(console: Console, rows: Iterable[tuple[str, ...]], styles: Iterable[str] = ()) -> None:
    """Columns as wide as their widest cell, two blanks in front and between; a style for each row, if given."""
    cells = [tuple([one_line(cell) for cell in row]) for row in rows]
    widths = [max([len(cell) for cell in column]) for column in zip(*cells, strict=True)]
    for row, style in zip(cells, list(styles) or [""] * len(cells), strict=True):
        line = "  ".join([cell.ljust(width) for cell, width in zip(row, widths, strict=True)])
        print_line(console, (f"  {line}".rstrip(), style))
