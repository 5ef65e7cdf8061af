"""Everything that can go wrong and that a person can mend.

An `UnshardError` is a message for people: what is wrong, where, what was found and what was expected, and a hint with
the next command to type. Anything else that escapes is a bug in unshard and is reported as one.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence


class UnshardError(Exception):
    """The base of all errors that the user can act on.

    `hint` is the next thing to do, shown after an empty line. `exit_code` is what the command line exits with.
    `problems` are the errors that this one tells together.
    """

    exit_code = 1
    code = "error"
    problems: tuple[UnshardError, ...] = ()

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n\nhint: {self.hint}" if self.hint else self.message


class UsageError(UnshardError):
    """The command or the options contradict each other, or do not fit what lies there."""

    exit_code = 2
    code = "usage"


class NotACheckpointError(UnshardError):
    """Nothing that we know how to read lies at the given place, or several things do."""

    exit_code = 3
    code = "not-a-checkpoint"


class FormatError(UnshardError):
    """A file is damaged, hostile, truncated, or of a kind that we refuse."""

    exit_code = 4
    code = "format"


class IncompleteError(UnshardError):
    """Pieces are missing, overlap, disagree with each other, or belong to different checkpoints."""

    exit_code = 5
    code = "incomplete"


class ModelError(UnshardError):
    """The tensors do not fit the model: unknown or missing names, wrong shapes, ties that do not hold."""

    exit_code = 6
    code = "model"


class OutputError(UnshardError):
    """The output cannot be written: the target is not empty, the disk is full, a write failed."""

    exit_code = 7
    code = "output"


class VerificationError(UnshardError):
    """The output was written, read again, and found to differ from its source."""

    exit_code = 8
    code = "verification"


def command_line(*words: str | os.PathLike[str]) -> str:
    """A command that can be pasted as it stands, for hints."""
    return shlex.join([os.fspath(word) for word in words])


def merge_command(source: str | os.PathLike[str], *words: str) -> str:
    """The merge of a checkpoint with further words, for hints: `OUT` and `DIR` are left to be chosen."""
    return command_line("unshard", "merge", source, "OUT", *words)


def config_hint(source: str, whose: str = "the stored") -> str:
    """What to type where a checkpoint has no config.json; `whose` names it has."""
    own, without = merge_command(source, "--config", "DIR"), merge_command(source, "--weights-only")
    return f"give the model's own: {own}\nor write {whose} names: {without}"


def raise_all(problems: Sequence[UnshardError]) -> None:
    """Raise nothing, the only problem, or one error of the first problem's kind that tells all of them."""
    if not problems:
        return
    if len(problems) == 1:
        raise problems[0]
    kind = type(problems[0])
    hints = list(dict.fromkeys(problem.hint for problem in problems if problem.hint))
    lines = [f"{len(problems)} problems:"]
    lines += [f"  {number}. " + problem.message.replace("\n", "\n     ") for number, problem in enumerate(problems, 1)]
    error = kind("\n".join(lines), hint="\nhint: ".join(hints) or None)
    error.problems = tuple(problems)
    raise error
