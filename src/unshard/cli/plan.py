"""`unshard plan SRC [OUT]`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unshard.cli import compat, requests
from unshard.cli import parser as options
from unshard.report.events import Message
from unshard.report.printers import Printer

if TYPE_CHECKING:
    from rich.console import Console

    from unshard.preparing import Preparation


def describe(parser: argparse.ArgumentParser) -> None:
    options.add_merge_options(parser, output="where a merge would write; it is checked, too")
    parser.add_argument("--save", type=options.path, metavar="FILE", help="write the plan as JSON to FILE")
    compat.add_options(parser, merges=True)


def run(arguments: argparse.Namespace, printer: Printer) -> int:
    """Print the plan, then warn of all reasons why a merge into OUT would be refused as things are now."""
    from unshard.preparing import prepare
    from unshard.run.decoding import scratch_beside
    from unshard.run.preflight import check_output

    source, output = compat.read_places(arguments, printer)
    if arguments.hf_upload_path is not None:
        printer.sink(Message("note", "a plan uploads nothing: `--hf_upload_path` is for `merge`"))
    request = requests.merge_options(arguments)
    prepared = prepare(source, request)
    if arguments.save:
        _save(prepared, arguments.save)
    printer.result(
        "plan",
        lambda: _to_json(prepared),
        lambda console: _print(console, source, prepared, verbose=arguments.verbose),
    )
    if output is not None:
        scratch = scratch_beside(output, prepared.plan, request.settings)
        for problem in check_output(prepared.plan, output, overwrite=arguments.overwrite, scratch=scratch.room):
            printer.sink(Message("warning", f"a merge would be refused: {problem.message}"))
    return 0


def _to_json(prepared: Preparation) -> dict[str, Any]:
    from unshard.plan.document import to_json
    from unshard.report.report import note_to_json

    notes = [note_to_json(note) for note in prepared.decision.notes]
    return {"plan": to_json(prepared.plan), "notes": notes, "dropped": dict(prepared.decision.model.dropped)}


def _print(console: Console, source: Path, prepared: Preparation, *, verbose: bool) -> None:
    from unshard.plan.explain import explain
    from unshard.report.console import print_facts, print_line, print_title
    from unshard.report.render import describe_dropped, model_in_words, print_notes

    model, target = prepared.decision.model, prepared.decision.target
    kind = model_in_words(model.family, is_adapter=target.is_adapter)
    print_facts(console, [("from", f"{source} ({prepared.checkpoint.title})"), ("model", kind)])
    print_title(console, "Plan")
    for line in explain(prepared.plan, target if verbose else None):
        print_line(console, line)
    if prepared.decision.notes or model.dropped:
        print_title(console, "Notes")
        print_notes(console, [*prepared.decision.notes, *describe_dropped(model.dropped)], verbose=verbose)


def _save(prepared: Preparation, file: Path) -> None:
    """Write the plan's document. Raises OutputError where that fails."""
    from unshard.errors import OutputError
    from unshard.plan.document import to_json

    try:
        file.write_text(json.dumps(to_json(prepared.plan)) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{file}: the plan cannot be saved: {error.strerror}", hint="choose another file") from error
