"""`unshard inspect SRC`."""

from __future__ import annotations

import argparse

from unshard.cli import parser as options
from unshard.report.printers import Printer


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", type=options.path, metavar="SRC", help="a checkpoint, a run that holds one, or a model"
    )
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    options.add_source_options(parser)


def run(arguments: argparse.Namespace, printer: Printer) -> int:
    """Print the catalog; the exit code is that of the worst problem in it."""
    from unshard.opening import open_checkpoint
    from unshard.options import MergeOptions
    from unshard.report.catalog import catalog_to_json, print_catalog

    wishes = MergeOptions(
        also=tuple(arguments.also),
        config=arguments.config,
        tokenizer=arguments.tokenizer,
        map=arguments.map,
        shapes_from=arguments.shapes_from,
        repair_index=arguments.repair_index,
        model_key=arguments.model_key,
        weights=arguments.weights,
        parallel=arguments.parallel,
    )
    checkpoint = open_checkpoint(arguments.source, wishes)
    tensors, verbose = arguments.tensors or arguments.verbose, arguments.verbose
    printer.result(
        "checkpoint",
        lambda: catalog_to_json(checkpoint),
        lambda console: print_catalog(console, checkpoint, tensors=tensors, verbose=verbose),
    )
    return max([problem.exit_code for problem in checkpoint.problems], default=0)
