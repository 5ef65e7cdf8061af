"""Pickles that would bring down who reads them, by size, by work or by depth: memory and time stay bounded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import torch_bytes as tb

SCALE = 12
"""The bombs are made for limits that are this much tighter than the real ones, so that they go off in no time."""

BOMBS: dict[str, bytes] = {
    "dicts": b"}" * 1_100_000,
    "dicts of one item": b"N" + b"}NNs" * 300_000,
    "lists in lists": b"]" * 700_000 + b"a" * 600_000,
    "lists of one item": b"]Na" * 600_000,
    "tuples": b")\x85" * 1_100_000,
    "memo": b"N" + b"\x94" * 600_000,
    "memo of dicts": b"}\x94" * 400_000,
    "records": tb.named("m", "C") + b"q\x01" + b"h\x01)\x81" * 300_000,
    "records with state": tb.named("m", "C") + b"q\x01" + b"h\x01)\x81}NNsb" * 150_000,
    "numbers": b"](" + b"J\xff\xff\xff\x7f" * 1_100_000 + b"e",
    "short texts": b"](" + b"\x8c\x02ab" * 1_100_000 + b"e",
    "copies of pairs": b"](" + b"".join(tb.text(str(number)) + b"K\x01\x86" for number in range(20_000)) + b"eq\x010"
    + tb.named("collections", "OrderedDict") + b"q\x02" + b"h\x02h\x01\x85R" * 100,
    "copies of states": tb.mapping({str(number): b"N" for number in range(20_000)}) + b"q\x010"
    + tb.named("m", "C") + b")\x81" + b"h\x01b" * 100,
    "no end of work": b"N0" * 1_500_000,
}  # fmt: skip

CHILD = """
import sys, time
from pathlib import Path
from unshard.errors import FormatError
from unshard.formats.torch_file import Limits, read_torch_file
from unshard.tensors import SourceFile

scale = int(sys.argv[2])
limits = Limits(operations=Limits().operations // scale, objects=Limits().objects // scale)
started = time.process_time()
try:
    read_torch_file(Path(sys.argv[1]), SourceFile("source", "model.pt"), limits=limits)
except FormatError as error:
    outcome = error.message
else:
    outcome = "read"
status = Path("/proc/self/status")
peak = 0  # Only Linux tells the peak of a process without that of its parent.
if status.exists():
    peak = next(int(line.split()[1]) // 1024 for line in status.open() if line.startswith("VmHWM"))
print(peak, round(time.process_time() - started, 1), outcome)
"""


def read_in_child(path: Path, scale: int = 1) -> tuple[int, float, str]:
    """Peak memory in MiB, seconds of CPU, and what became of it: so a crash of the interpreter shows."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), str(scale)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    peak, seconds, outcome = done.stdout.strip().split(" ", 2)
    return int(peak), float(seconds), outcome


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_cost_seconds_and_less_than_a_gib(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(tb.archive(tb.torch_members(tb.finish(BOMBS[name], 4))))
    peak, seconds, outcome = read_in_child(path, SCALE)
    assert outcome.startswith("model.pt: the pickle ")
    assert "more" in outcome
    assert peak < 30 + 1024 / SCALE
    assert seconds < 60 / SCALE


DEPTH = 500_000
DEEP: dict[str, bytes] = {
    "tuples": b")" + b"\x85" * DEPTH,
    "lists": b"]" * DEPTH + b"a" * (DEPTH - 1),
    "states": tb.named("m", "C") + b"q\x01)\x81" + (b"q\x020h\x01)\x81h\x02b") * (DEPTH // 5),
    "arguments": tb.named("m", "C") + b"q\x010)" + b"q\x020h\x01h\x02\x85R" * (DEPTH // 5),
    "marks": b"(" * DEPTH + b"t" * DEPTH,
}


@pytest.mark.parametrize("name", DEEP)
def test_deep_nesting_neither_recurses_nor_crashes(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(tb.archive(tb.torch_members(tb.finish(DEEP[name], 4))))
    peak, seconds, outcome = read_in_child(path)
    assert outcome == "read"
    assert peak < 500
    assert seconds < 30
