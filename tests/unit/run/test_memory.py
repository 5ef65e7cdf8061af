"""Memory does not grow with the model: four times the bytes, the same peak."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os
import sys
from pathlib import Path
from unshard.dtypes import BF16, F32
from unshard.plan.moves import Copy, Plan, PlannedFile, Tile
from unshard.report.events import ignore
from unshard.run.local import run_plan
from unshard.settings import Settings
from unshard.tensors import Box, Chunk, Encoded, Extent, SourceFile

source, kind, rows = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
file, columns = SourceFile("source", "shard"), 4096
size = rows * columns * 4
with open(source / "shard", "wb") as target:
    target.truncate(size)
strides = {"cast": (columns * 4, 4), "transpose": (4, rows * 4), "encoded": (4, rows * 4)}
if kind == "encoded":
    import zstandard
    writer = zstandard.ZstdCompressor().compressobj()
    with open(source / "shard", "wb") as target:
        for at in range(0, size, 1 << 20):
            target.write(writer.compress(os.urandom(1 << 18) + bytes((1 << 20) - (1 << 18))))
        target.write(writer.flush())
    file = SourceFile("source", "shard", Encoded("zstd", 0, os.path.getsize(source / "shard"), size))
if kind == "copy":
    move = Copy(0, size, file, 0)
else:
    chunk = Chunk(Box((0, 0), (rows, columns)), Extent(file, 0, strides[kind], F32))
    move = Tile(0, BF16, (rows, columns), (chunk,), "tensor")
plan = Plan({"source": source}, (PlannedFile("model", move.size, (move,)),))
run_plan(plan, source / "out", Settings(jobs=2), ignore)
(peak,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(int(peak) * 1024)
"""


def peak_memory(directory: Path, kind: str, rows: int) -> int:
    directory.mkdir()
    command = [sys.executable, "-c", SCRIPT, str(directory), kind, str(rows)]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize(
    ("kind", "most"), [("copy", 40 << 20), ("cast", 60 << 20), ("transpose", 100 << 20), ("encoded", 110 << 20)]
)
def test_peak_memory(tmp_path: Path, kind: str, most: int) -> None:
    if kind == "encoded":
        pytest.importorskip("zstandard")
    small, large = peak_memory(tmp_path / "small", kind, 2048), peak_memory(tmp_path / "large", kind, 8192)
    assert large < small * 1.1 + (2 << 20)
    assert large < most
