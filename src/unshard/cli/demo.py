"""`unshard demo [OUT]`: a bundled real checkpoint becomes a verified model."""

from __future__ import annotations

import argparse
from pathlib import Path

from unshard.report.printers import JsonPrinter, Printer

AFTERWARDS = """\
Load it:

    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained("{output}")
    tokenizer = AutoTokenizer.from_pretrained("{output}")
"""


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "output", nargs="?", type=Path, default=Path("demo-output"), metavar="OUT", help="default: demo-output"
    )


def run(arguments: argparse.Namespace, printer: Printer) -> int:
    from importlib.resources import as_file, files

    from unshard.merging import merge
    from unshard.options import MergeOptions
    from unshard.report.render import plain_console, print_report

    console = plain_console()
    with as_file(files("unshard") / "demo_data") as data:
        for name in sorted(path.name for path in data.iterdir() if path.is_dir()):
            output = arguments.output / name
            if not isinstance(printer, JsonPrinter):
                console.print(f"$ unshard merge {name} {output}\n", markup=False)
            report = merge(data / name, output, MergeOptions(overwrite=True), printer.sink)
            if isinstance(printer, JsonPrinter):
                printer.write("report", report.to_json())
                continue
            print_report(report, verbose=arguments.verbose)
            console.print("")
    if not isinstance(printer, JsonPrinter):
        console.print(AFTERWARDS.format(output=arguments.output / "model"), markup=False)
    return 0
