"""The command line: one small module per command, verl's words in `compat`."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

from unshard.cli.process import prepare_streams, terminable

COMMANDS = {
    "inspect": "say what lies there: format, ranks, mesh, tensors, problems",
    "plan": "show what a merge would do, to the byte, and move nothing",
    "merge": "write a Hugging Face model and verify it",
    "verify": "check a merged model, alone or against its source or another model",
    "test": "compare a checkpoint or a merged model with a reference model (verl's word)",
    "demo": "merge a bundled checkpoint and show the result",
}
"""Each is a module of this package with `describe(parser)` and `run(arguments, printer) -> exit code`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code. Whatever goes wrong is printed, never raised."""
    from unshard.cli.troubles import CLOSED_PIPE, explain
    from unshard.errors import command_line
    from unshard.report.printers import ReaderGone, choose_printer

    words = list(sys.argv[1:] if argv is None else argv)
    prepare_streams()
    printer = choose_printer(as_json=any(len(word) > 3 and "--json".startswith(word) for word in words))
    try:
        with terminable():
            return _run(words)
    except SystemExit as end:  # argparse has printed its help
        return int(end.code or 0)
    except ReaderGone:
        return CLOSED_PIPE
    except BaseException as error:
        if "--debug" in words:
            traceback.print_exc()
        trouble = explain(error, command_line("unshard", *words))
        with suppress(ReaderGone):
            printer.error(trouble)
        return trouble.exit_code


def _run(words: Sequence[str]) -> int:
    """Find the command, parse its words, run it. Options that all commands know may stand before it."""
    from unshard.cli.compat import DIALECTS
    from unshard.cli.parser import build_parser
    from unshard.cli.spelling import spell_out
    from unshard.report.printers import choose_printer

    place = next((place for place, word in enumerate(words) if not word.startswith("-")), None)
    if place is None:
        return _run_without_command(words)
    name, others = words[place], [*words[:place], *words[place + 1 :]]
    if name not in COMMANDS:
        raise _unknown_command(name, others)
    command = import_module(f"unshard.cli.{name}")
    parser = build_parser(name, COMMANDS[name], command.describe)
    arguments = parser.read(spell_out(others, parser.spellings, DIALECTS.get(name, ()), parser.prog))
    arguments.command = name
    with choose_printer(as_json=arguments.json, quiet=arguments.quiet, verbose=arguments.verbose) as printer:
        exit_code: int = command.run(arguments, printer)
        return exit_code


def _run_without_command(words: Sequence[str]) -> int:
    """`unshard --help`, `unshard --version`, or nothing to do."""
    from unshard import __version__
    from unshard.cli.parser import build_overview
    from unshard.cli.spelling import spell_out
    from unshard.errors import UsageError
    from unshard.report.console import print_line
    from unshard.report.printers import choose_printer

    parser = build_overview(list(COMMANDS.items()))
    arguments = parser.read(spell_out(words, parser.spellings, (), parser.prog))
    if not arguments.version:
        raise UsageError(f"no command was given; there are {', '.join(COMMANDS)}", hint="unshard --help")
    printer = choose_printer(as_json=arguments.json)
    printer.result(
        "version", lambda: {"version": __version__}, lambda console: print_line(console, f"unshard {__version__}")
    )
    return 0


def _unknown_command(name: str, others: Sequence[str]) -> Exception:
    """The error of a first word that is no command: a misspelled one, or a path whose command was forgotten."""
    from difflib import get_close_matches
    from pathlib import Path

    from unshard.errors import UsageError, command_line

    near = get_close_matches(name, COMMANDS, 1)
    if not near and Path(name).exists():
        paths = [word for word in others if not word.startswith("-")]
        line = command_line("unshard", "merge" if paths else "inspect", name, *others)
        return UsageError(f"`{name}` is a path; the command comes first: {', '.join(COMMANDS)}", hint=line)
    hint = command_line("unshard", near[0], *others) if near else "unshard --help"
    return UsageError(f"there is no command `{name}`; there are {', '.join(COMMANDS)}", hint=hint)
