"""`unshard inspect SRC`."""

from __future__ import annotations

import argparse
from pathlib import Path

from unshard.cli import parser as options
from unshard.report.printers import JsonPrinter, Printer


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="SRC", help="a checkpoint, a run that holds one, or a model")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    options.add_source_options(parser)


def run(arguments: argparse.Namespace, printer: Printer) -> int:
    from unshard.opening import open_checkpoint
    from unshard.options import MergeOptions
    from unshard.report.catalog import catalog_to_json, print_catalog

    wishes = MergeOptions(also=tuple(arguments.also), config=arguments.config, shapes_from=arguments.shapes_from)
    checkpoint = open_checkpoint(arguments.source, wishes)
    if isinstance(printer, JsonPrinter):
        printer.write("checkpoint", catalog_to_json(checkpoint))
    else:
        print_catalog(checkpoint, tensors=arguments.tensors or arguments.verbose)
    return max([problem.exit_code for problem in checkpoint.problems], default=0)
