"""Figures and names as people read them."""

from __future__ import annotations

from collections.abc import Sequence


def bytes_in_words(size: float) -> str:
    """1234567 → "1.23 MB". Decimal units, three digits."""
    if size < 1000:
        return f"{size:.0f} B"
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.5:
            return f"{size:.3g} {unit}"
    return f"{size / 1000:.3g} TB"


def seconds_in_words(seconds: float) -> str:
    """0.04 → "0.04 s"; 75 → "1 min 15 s"."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def count_in_words(count: int, noun: str, plural: str = "") -> str:
    """(1, "tensor") → "1 tensor"; (1200, "tensor") → "1,200 tensors"."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def names_in_words(names: Sequence[str], most: int = 3) -> str:
    """The first names and how many more there are."""
    shown = ", ".join([f"`{one_line(name)}`" for name in names[:most]])
    return f"{shown} and {len(names) - most:,} more" if len(names) > most else shown


def printable(text: str) -> str:
    r"""Text from files and file names without what a terminal would obey: "\x1b[2J" → "\\x1b[2J". Line breaks stay."""
    if text.isprintable():
        return text
    return "".join([char if char.isprintable() or char == "\n" else _escape(char) for char in text])


def one_line(text: str) -> str:
    """The same for what must not go over several lines: a name, a path."""
    return text if text.isprintable() else "".join([char if char.isprintable() else _escape(char) for char in text])


def _escape(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")
