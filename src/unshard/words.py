"""Figures, names and lists as people read them, in errors, notes and reports alike."""

from __future__ import annotations

from collections.abc import Collection, Sequence


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
    """The first names, in backquotes, and how many more there are."""
    return items_in_words([f"`{one_line(name)}`" for name in names], most)


def items_in_words(items: Sequence[str], most: int = 8) -> str:
    """(["a", "b", "c"], 2) → "a, b and 1 more"."""
    shown = ", ".join(items[:most])
    return f"{shown} and {len(items) - most:,} more" if len(items) > most else shown


def items_in_lines(items: Sequence[str], most: int = 20) -> str:
    """The first items, each on an indented line of its own, and how many more there are."""
    lines = [f"  {item}" for item in items[:most]]
    return "\n".join([*lines, f"  … and {len(items) - most:,} more"] if len(items) > most else lines)


def ranks_in_words(ranks: Collection[int]) -> str:
    """[5] → "rank 5"; [0, 1, 2, 3, 8] → "ranks 0-3, 8"."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges_in_words(ranks)}"


def ranges_in_words(numbers: Collection[int], separator: str = ", ") -> str:
    """[0, 1, 2, 3, 8] → "0-3, 8"."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return separator.join([f"{low}" if low == high else f"{low}-{high}" for low, high in ranges])


def shorten(text: str, most: int) -> str:
    """The first characters of a text that strangers chose, and an ellipsis if there are more."""
    return text if len(text) <= most else text[:most] + "…"


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
