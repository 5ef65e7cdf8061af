"""`unshard test`: verl's word for verifying against a model."""

from __future__ import annotations

import argparse

from unshard.cli import compat
from unshard.cli import parser as options
from unshard.cli.verify import add_tolerance, judge
from unshard.errors import UsageError, command_line
from unshard.report.printers import Printer


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", nargs="?", type=options.path, metavar="SRC", help="a checkpoint or a merged model")
    parser.add_argument(
        "reference", nargs="?", type=options.path, metavar="HF_DIR", help="the model to compare it with"
    )
    parser.add_argument("--test_hf_dir", type=options.path, metavar="DIR", help="the same as HF_DIR")
    add_tolerance(parser)
    options.add_source_options(parser)
    options.add_model_options(parser)
    options.add_engine_options(parser)
    compat.add_options(parser, merges=False)


def run(arguments: argparse.Namespace, printer: Printer) -> int:
    """See `verify.judge`."""
    compat.share_positionals(arguments, "reference")
    source = compat.source_of(arguments)
    reference = compat.choose_one(arguments.reference, arguments.test_hf_dir, ("HF_DIR", "--test_hf_dir"))
    if reference is None:
        hint = command_line("unshard", "test", source, "--test_hf_dir", "HF_DIR")
        raise UsageError("HF_DIR is missing: no model to compare with was given", hint=hint)
    compat.tell_idle(arguments, printer)
    return judge(arguments, printer, source, reference)
