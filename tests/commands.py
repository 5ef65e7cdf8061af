"""Commands as a person types them, run in this process."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unshard.cli import main


@dataclass(frozen=True)
class Outcome:
    """What came of a command."""

    code: int
    stdout: str
    stderr: str

    @property
    def events(self) -> list[dict[str, Any]]:
        """The JSON lines of stdout."""
        return [json.loads(line) for line in self.stdout.splitlines()]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.code, self.stdout, self.stderr))


def run(*words: str | Path) -> Outcome:
    """Run `unshard WORDS`."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = main([str(word) for word in words])
    return Outcome(code, stdout.getvalue(), stderr.getvalue())
