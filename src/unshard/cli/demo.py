"""`unshard demo [OUT]`: bundled real checkpoints become verified models."""

from __future__ import annotations

import argparse
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING

from unshard.cli import parser as options
from unshard.errors import command_line
from unshard.report.printers import Printer

if TYPE_CHECKING:
    from rich.console import Console

    from unshard.report.report import Report

DEFAULT_OUTPUT = Path("demo-output")

AFTERWARDS = """\
Load it:

    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained("{output}")
    tokenizer = AutoTokenizer.from_pretrained("{output}")
"""


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "output", nargs="?", type=options.path, default=DEFAULT_OUTPUT, metavar="OUT",
        help=f"default: {DEFAULT_OUTPUT}",
    )  # fmt: skip


def run(arguments: argparse.Namespace, printer: Printer) -> int:
    """Merge every bundled checkpoint and print its report. In the default place, an earlier demo's models go."""
    from unshard.merging import merge
    from unshard.options import MergeOptions
    from unshard.report.console import print_line

    wishes = MergeOptions(overwrite=arguments.output == DEFAULT_OUTPUT)
    with as_file(files("unshard") / "demo_data") as data:
        for source in sorted(place for place in data.iterdir() if place.is_dir()):
            output = arguments.output / source.name
            report = merge(source, output, wishes, printer.sink)
            printer.result("report", report.to_json, partial(_show, report, verbose=arguments.verbose))
    model = arguments.output / "model"
    printer.result(
        "demo", lambda: {"output": str(model)}, lambda console: print_line(console, AFTERWARDS.format(output=model))
    )
    return 0


def _show(report: Report, console: Console, *, verbose: bool) -> None:
    """What would have been typed, and what comes of it."""
    from unshard.report.console import print_line
    from unshard.report.render import print_report

    print_line(console, "$ ", (command_line("unshard", "merge", report.source, report.output), "bold"), "\n")
    print_report(console, report, verbose=verbose)
    console.print()
