"""The command line: one small module per command, verl's words in `compat`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "inspect": "say what lies there: format, ranks, mesh, tensors, problems",
    "plan": "show what a merge would do, to the byte, and move nothing",
    "merge": "write a Hugging Face model and verify it",
    "verify": "check a merged model, alone or against its source or another model",
    "test": "compare a checkpoint or a merged model with a reference model (verl's word)",
    "demo": "merge a bundled checkpoint and show the result",
}
"""Each is a module of this package with `describe(parser)` and `run(arguments, printer) -> exit code`."""

INTERRUPTED = 130
BROKEN_PIPE = 141
BUG = 70


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code. Errors of the user's world are printed, never raised."""
    from unshard.cli.parser import build_parser
    from unshard.errors import UnshardError
    from unshard.report.printers import choose_printer

    words = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in words
    printer = choose_printer(as_json=as_json, quiet=False, verbose=False)
    try:
        wanted = next((word for word in words if not word.startswith("-")), None)
        command = import_module(f"unshard.cli.{wanted}") if wanted in COMMANDS else None
        describe = {wanted: command.describe} if command else {}
        parser = build_parser([(name, line, describe.get(name)) for name, line in COMMANDS.items()])
        arguments = parser.parse_args(words)
        if command is None:
            parser.print_help()
            return 2
        printer = choose_printer(as_json=arguments.json, quiet=arguments.quiet, verbose=arguments.verbose)
        with printer:
            exit_code: int = command.run(arguments, printer)
            return exit_code
    except UnshardError as error:
        printer.error(error)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted: nothing was published", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        if "--debug" in words:
            raise
        bug = UnshardError(
            f"this is a bug in unshard: {type(error).__name__}: {error}",
            hint="run the same command with --debug and report what it prints",
        )
        printer.error(bug)
        return BUG
