"""The command line that all tables of golden checkpoints share: `[--only TEXT] [--out DIRECTORY] [--describe]`."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import transformers

from golden.make.description import Described, describe

_CASES = Path(__file__).parents[1] / "cases"

AnyCase = TypeVar("AnyCase", bound=Described)


def make_parser(about: str | None) -> argparse.ArgumentParser:
    """The options of every table."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--only", default="", help="names that contain this text")
    parser.add_argument("--out", type=Path, default=_CASES)
    parser.add_argument("--describe", action="store_true", help="rewrite case.json alone, after a change of the table")
    return parser


def write_cases(
    arguments: argparse.Namespace,
    cases: Iterable[AnyCase],
    packages: tuple[str, ...],
    write: Callable[[AnyCase, Path], None],
) -> None:
    """Write each case that was asked for, from scratch; `packages` are those whose versions it depends on."""
    warnings.filterwarnings("ignore")
    transformers.utils.logging.disable_progress_bar()
    for case in cases:
        if arguments.only in case.name:
            if not arguments.describe:
                write(case, arguments.out / case.name)
            describe(case, arguments.out / case.name, packages)
            print(case.name, flush=True)
