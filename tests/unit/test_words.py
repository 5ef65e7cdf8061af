"""Figures, names and lists as people read them."""

from __future__ import annotations

import pytest

from unshard.words import (
    bytes_in_words,
    count_in_words,
    items_in_lines,
    items_in_words,
    names_in_words,
    one_line,
    printable,
    ranges_in_words,
    ranks_in_words,
    seconds_in_words,
    shorten,
)


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_234_567, "1.23 MB"), (999_600, "1 MB"), (5e12, "5 TB")],
)
def test_sizes_have_three_digits(size: float, words: str) -> None:
    assert bytes_in_words(size) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.04, "0.04 s"), (1, "1.0 s"), (59.96, "1 min 0 s"), (75, "1 min 15 s"), (3660, "1 h 1 min")],
)
def test_times_have_the_units_that_fit(seconds: float, words: str) -> None:
    assert seconds_in_words(seconds) == words


def test_one_thing_is_singular() -> None:
    assert [count_in_words(number, "entry", "entries") for number in (0, 1, 1200)] == [
        "0 entries",
        "1 entry",
        "1,200 entries",
    ]


def test_lists_tell_how_many_they_leave_out() -> None:
    names = [f"n{number}" for number in range(1203)]
    assert items_in_words(names[:2], 2) == "n0, n1"
    assert items_in_words(names, 2) == "n0, n1 and 1,201 more"
    assert names_in_words(names, 1) == "`n0` and 1,202 more"
    assert items_in_lines(names[:2], 2) == "  n0\n  n1"
    assert items_in_lines(names, 2) == "  n0\n  n1\n  … and 1,201 more"
    assert items_in_words([]) == ""


def test_ranks_are_told_as_ranges() -> None:
    assert ranges_in_words([8, 0, 1, 2, 5, 7]) == "0-2, 5, 7-8"
    assert ranks_in_words({5}) == "rank 5"
    assert ranks_in_words({5, 3, 4}) == "ranks 3-5"


def test_what_a_terminal_would_obey_is_escaped() -> None:
    assert printable("a\x1b[2J\nb") == "a\\x1b[2J\nb"
    assert one_line("a\x1b[2J\nb") == "a\\x1b[2J\\nb"
    assert one_line("ß\ud800") == "ß\\ud800"


def test_long_texts_are_cut() -> None:
    assert (shorten("abc", 3), shorten("abcd", 3)) == ("abc", "abc…")
