"""`unshard merge SRC OUT`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from unshard.cli import compat, requests
from unshard.cli import parser as options
from unshard.errors import UsageError, command_line
from unshard.report.events import Event, Message, PhaseFinished
from unshard.report.printers import Printer

if TYPE_CHECKING:
    from unshard.report.report import Report


def describe(parser: argparse.ArgumentParser) -> None:
    options.add_merge_options(parser, output="where to write the model")
    compat.add_options(parser, merges=True)


def run(arguments: argparse.Namespace, printer: Printer) -> int:
    """Merge, print the report, and upload if that was asked for."""
    from unshard import hub
    from unshard.report.render import print_report

    source, output = compat.read_places(arguments, printer)
    if output is None:
        hint = command_line("unshard", "merge", source, "OUT")
        raise UsageError("OUT is missing: no place to write to was given", hint=hint)
    repository = arguments.hf_upload_path
    if repository is not None:
        hub.check_upload(repository)
    report = _merge(arguments, printer, source, output)
    verbose = arguments.verbose
    printer.result("report", report.to_json, lambda console: print_report(console, report, verbose=verbose))
    if repository is not None:
        address = hub.upload(output, repository, [path for path, _ in report.files], private=arguments.private)
        printer.sink(Message("note", f"uploaded to {address}"))
    return 0


def _merge(arguments: argparse.Namespace, printer: Printer, source: Path, output: Path) -> Report:
    """Merge; Ctrl-C says in which state it leaves the output."""
    from unshard.merging import merge

    published = False

    def watch(event: Event) -> None:
        nonlocal published
        published = published or (isinstance(event, PhaseFinished) and event.phase == "write")
        printer.sink(event)

    try:
        return merge(source, output, requests.merge_options(arguments), watch)
    except KeyboardInterrupt as stop:
        if not published:
            raise type(stop)(f"`{output}` is as it was before") from None
        hint = command_line("unshard", "verify", output, "--against", source)
        message = f"the model in `{output}` is complete, but was not verified to the end"
        raise type(stop)(message, hint) from None
