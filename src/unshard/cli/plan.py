"""`unshard plan SRC OUT`."""

from __future__ import annotations

import argparse
from pathlib import Path

from unshard.cli import compat, requests
from unshard.cli import parser as options
from unshard.report.printers import JsonPrinter, Printer


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", nargs="?", type=Path, metavar="SRC", help="a checkpoint, or a run that holds one")
    parser.add_argument("output", nargs="?", type=Path, metavar="OUT", help="where a merge would write")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the plan as JSON to FILE")
    options.add_source_options(parser)
    options.add_model_options(parser)
    options.add_output_options(parser)
    options.add_engine_options(parser)
    compat.add_options(parser, merges=True)


def run(arguments: argparse.Namespace, printer: Printer) -> int:
    from unshard.merging import prepare
    from unshard.plan.document import to_json
    from unshard.plan.explain import explain
    from unshard.report.render import plain_console, print_notes
    from unshard.report.report import note_to_json

    compat.share_positionals(arguments)
    prepared = prepare(compat.source_of(arguments), requests.merge_options(arguments))
    if arguments.save:
        import json

        arguments.save.write_text(json.dumps(to_json(prepared.plan)) + "\n")
    if isinstance(printer, JsonPrinter):
        notes = [note_to_json(note) for note in prepared.notes]
        printer.write("plan", {"plan": to_json(prepared.plan), "notes": notes, "dropped": dict(prepared.model.dropped)})
        return 0
    console = plain_console()
    for line in explain(prepared.plan, prepared.target if arguments.verbose else None):
        console.print(line, markup=False)
    if prepared.notes:
        console.print("\nNotes")
        print_notes(console, prepared.notes, verbose=arguments.verbose)
    return 0
