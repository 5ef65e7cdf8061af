"""A fuzz target for the reader of torch files: only FormatError may escape, whatever the bytes are.

By hand, with atheris (`pip install atheris`), which mutates files of the corpus and watches which code they reach:

    python tests/attacks/fuzz_torch_file.py CORPUS_DIRECTORY -max_total_time=600

Without atheris the same target runs once on each file that is named.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path

from unshard.errors import FormatError
from unshard.formats.torch_file import Limits, read_torch_file
from unshard.tensors import SourceFile

LIMITS = Limits(operations=200_000, objects=100_000)
FILE = SourceFile("source", "fuzzed.pt")


def read_bytes(data: bytes, directory: Path) -> None:
    """Read the bytes as a torch file; let nothing but a FormatError pass."""
    path = directory / "fuzzed.pt"
    path.write_bytes(data)
    with contextlib.suppress(FormatError):
        read_torch_file(path, FILE, limits=LIMITS)


def main(arguments: list[str]) -> None:
    """Run atheris on the target, or the target on the named files."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        try:
            import atheris
        except ImportError:
            for argument in arguments[1:]:
                read_bytes(Path(argument).read_bytes(), directory)
            return
        atheris.instrument_all()
        atheris.Setup(arguments, lambda data: read_bytes(data, directory))
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
