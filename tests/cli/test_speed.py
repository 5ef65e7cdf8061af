"""How quick the commands are that people type to look around: 0.15 s for help, 0.4 s for `inspect`.

What counts is processor time, and of several runs the best: the rest is what else the machine had to do.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

import pytest

SLOW_TO_LOAD = {
    "numpy", "ml_dtypes", "safetensors", "torch", "rich.progress", "rich.markdown", "asyncio", "zipfile",
    "unshard.formats", "unshard.merging", "unshard.preparing", "unshard.run", "unshard.adapters", "unshard.families",
}  # fmt: skip
"""Modules that help needs not."""


def time_of_children() -> float:
    """Processor seconds of all processes that this one has waited for."""
    usage = getrusage(RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def best_time(words: list[str], enough: float, tries: int = 15) -> float:
    """Processor seconds of the quickest run; no more runs once one took no more than `enough`."""
    best = float("inf")
    for _ in range(tries):
        before = time_of_children()
        subprocess.run([sys.executable, "-m", "unshard", *words], check=True, capture_output=True)
        best = min(best, time_of_children() - before)
        if best <= enough:
            break
    return best


@pytest.mark.parametrize("words", [["--help"], ["merge", "--help"], ["--version"]], ids=" ".join)
def test_help(words: list[str]) -> None:
    assert best_time(words, 0.15) <= 0.15


@pytest.mark.parametrize("case", ["fsdp2_w4", "fsdp1_sharded_tensor", "lora"])
def test_inspect(case: str, committed_golden: Path) -> None:
    assert best_time(["inspect", str(committed_golden / case / "ckpt")], 0.4) <= 0.4


@pytest.mark.parametrize("words", [["--help"], ["merge", "--help"], ["merg"]], ids=" ".join)
def test_help_loads_little(words: list[str]) -> None:
    program = "import sys; from unshard.cli import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    found = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    loaded = set(found.stderr.splitlines()[-1].split())
    assert "unshard.cli" in loaded
    assert not SLOW_TO_LOAD & loaded


def test_inspect_loads_no_arrays(committed_golden: Path) -> None:
    program = "import sys; from unshard.cli import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    words = ["inspect", str(committed_golden / "fsdp2_w4" / "ckpt")]
    found = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    assert not {"numpy", "ml_dtypes", "safetensors", "rich.progress"} & set(found.stderr.split())
