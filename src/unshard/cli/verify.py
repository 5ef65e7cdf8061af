"""`unshard verify OUT [--against SRC|HF_DIR]`."""

from __future__ import annotations

import argparse
from pathlib import Path

from unshard.cli import compat, requests
from unshard.cli import parser as options
from unshard.report.printers import Printer


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", type=options.path, metavar="OUT", help="a merged model")
    parser.add_argument("--against", type=options.path, metavar="DIR", help="its source, or any Hugging Face model")
    add_tolerance(parser)
    options.add_source_options(parser)
    options.add_model_options(parser)
    options.add_engine_options(parser)
    compat.add_model_words(parser.add_argument_group("verl's words"))


def add_tolerance(parser: argparse.ArgumentParser) -> None:
    """What still counts as equal."""
    group = parser.add_argument_group("tolerance (default: equal bits)")
    group.add_argument("--atol", type=options.positive, metavar="X", help="greatest absolute difference")
    group.add_argument("--rtol", type=options.positive, metavar="X", help="greatest relative difference")
    group.add_argument("--min-cosine", type=options.number, metavar="X", help="least cosine similarity of each tensor")


def run(arguments: argparse.Namespace, printer: Printer) -> int:
    """See `judge`."""
    return judge(arguments, printer, arguments.output, arguments.against)


def judge(arguments: argparse.Namespace, printer: Printer, output: Path, against: Path | None) -> int:
    """Compare and print the verdict. Raises VerificationError where it does not hold."""
    from unshard.errors import VerificationError
    from unshard.report.verdict import print_verdict, verdict_to_json
    from unshard.verify.against import verify_against
    from unshard.verify.compare import Tolerance

    tolerance = Tolerance(arguments.atol, arguments.rtol, arguments.min_cosine)
    verdict = verify_against(output, against, tolerance, requests.merge_options(arguments), printer.sink)
    printer.result(
        "verdict",
        lambda: verdict_to_json(verdict),
        lambda console: print_verdict(console, verdict, verbose=arguments.verbose),
    )
    if not verdict.holds:
        raise VerificationError(f"`{output}` and `{against}` are not the same model", hint=verdict.hint)
    return 0
