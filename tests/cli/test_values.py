"""What may be written after an option."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

import pytest

from commands import run
from unshard.cli import parser


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("1000000", 10**6),
        ("5GB", 5 * 10**9),
        ("5gb", 5 * 10**9),
        ("5 GB", 5 * 10**9),
        ("5G", 5 * 10**9),
        ("512MiB", 512 << 20),
        ("512Mi", 512 << 20),
        ("0.5kB", 500),
        ("2.5GiB", 5 << 29),
        ("1TB", 10**12),
        ("100000000000000001GB", 100000000000000001 * 10**9),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert parser.size(text) == value


@pytest.mark.parametrize("text", ["", "0", "-1", "GB", "5x", "5 G B", "1e9", "0.0001", "inf", "nan", "9" * 31, "٣GB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="is no size"):
        parser.size(text)


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (parser.count, ["0", "-1", "1.5", "", "x", "²", "9" * 20]),
        (parser.jobs, ["0", "257", "x"]),
        (parser.number, ["", "x", "inf", "nan", "1e999"]),
        (parser.positive, ["-1", "-0.001", "nan"]),
        (parser.path, [""]),
    ],
)
def test_refused(kind: Callable[[str], object], texts: list[str]) -> None:
    for text in texts:
        with pytest.raises(ArgumentTypeError):
            kind(text)


def test_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert parser.path("~/checkpoint") == Path("/home/somebody/checkpoint")
    assert parser.path("a/~b") == Path("a/~b")


@pytest.mark.parametrize("word", ["bf16", "bfloat16"])
def test_types_under_both_names(word: str, committed_golden: Path, tmp_path: Path) -> None:
    outcome = run("merge", committed_golden / "fsdp2_w4" / "ckpt", tmp_path / "out", "--dtype", word)
    assert "15 tensors went from F32 to BF16" in outcome.stdout


@pytest.mark.parametrize(
    "options", [("--memory", "1"), ("--jobs", "256"), ("--memory", "1", "--jobs", "9")], ids=" ".join
)
def test_the_engine_works_in_any_room(options: tuple[str, ...], committed_golden: Path, tmp_path: Path) -> None:
    case = committed_golden / "fsdp2_tp_names"
    assert run("merge", case / "ckpt", tmp_path / "out", "--dtype", "bf16", *options).code == 0
    assert run("verify", tmp_path / "out", "--against", case / "ckpt", "--dtype", "bf16", *options).code == 0
