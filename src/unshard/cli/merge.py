"""`unshard merge SRC OUT`."""

from __future__ import annotations

import argparse
from pathlib import Path

from unshard.cli import compat, requests
from unshard.cli import parser as options
from unshard.report.events import Message
from unshard.report.printers import JsonPrinter, Printer


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", nargs="?", type=Path, metavar="SRC", help="a checkpoint, or a run that holds one")
    parser.add_argument("output", nargs="?", type=Path, metavar="OUT", help="where to write the model")
    options.add_source_options(parser)
    options.add_model_options(parser)
    options.add_output_options(parser)
    options.add_engine_options(parser)
    compat.add_options(parser, merges=True)


def run(arguments: argparse.Namespace, printer: Printer) -> int:
    from unshard.hub import require_hub, upload
    from unshard.merging import merge
    from unshard.report.render import print_report

    compat.share_positionals(arguments)
    source, output = compat.source_of(arguments), compat.target_of(arguments)
    for sentence in compat.idle_options(arguments):
        printer.sink(Message("note", sentence))
    if arguments.hf_upload_path:
        require_hub()
    report = merge(source, output, requests.merge_options(arguments), printer.sink)
    if arguments.hf_upload_path:
        upload(output, arguments.hf_upload_path, private=arguments.private)
    if isinstance(printer, JsonPrinter):
        printer.write("report", report.to_json())
    else:
        print_report(report, verbose=arguments.verbose)
    return 0
