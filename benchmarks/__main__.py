"""`python -m benchmarks`: merges of generated checkpoints against `cat SHARDS > file && sync file`, as one table.

All contenders take turns, so that whatever else the machine does hits them alike; each figure is a median, and so is
each ratio to the baseline of the same round. Source files are in the page cache for all. Every output is compared with
the truth. Generating the checkpoints takes PyTorch, once; merging them does not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from itertools import product
from pathlib import Path
from statistics import median

from benchmarks.checkpoint import KINDS, SIZES, Generated, check, generate
from benchmarks.contenders import Contender, contenders
from benchmarks.measure import Measurement, measure


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n\n")[0])
    parser.add_argument("--kind", action="append", choices=KINDS, help="of checkpoint; default: all")
    parser.add_argument("--size", action="append", choices=SIZES, help="GB of the checkpoint; default: all")
    parser.add_argument("--pairs", type=int, default=5, help="rounds per contender (default: 5)")
    parser.add_argument("--directory", type=Path, default=Path("build/benchmarks"), help="where all files go")
    parser.add_argument("--peers", default=sys.executable, help="the Python that has verl (default: this one)")
    parser.add_argument("--only", default="", help="contenders whose title contains this, besides the baseline")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    directory = arguments.directory.resolve()
    for kind, size in product(arguments.kind or KINDS, arguments.size or SIZES):
        checkpoint = generate(kind, size, directory)
        chosen = contenders(arguments.peers, checkpoint)
        chosen = [chosen[0], *[contender for contender in chosen[1:] if arguments.only in contender.title]]
        print(f"\n{checkpoint.kind.title}: {checkpoint.shape.size / 1e9:.2f} GB\n", flush=True)
        print_table(chosen, race(chosen, checkpoint, directory / "output", arguments.pairs))


def race(chosen: list[Contender], checkpoint: Generated, output: Path, rounds: int) -> list[list[Measurement]]:
    """Rounds of one run each; per contender its measurements. An unmeasured baseline first warms the cache."""
    run(chosen[0], checkpoint, output)
    results: list[list[Measurement]] = [[] for _ in chosen]
    for number in range(rounds):
        for contender, result in zip(chosen, results, strict=True):
            print(f"  round {number + 1}: {contender.title}", file=sys.stderr, flush=True)
            try:
                result.append(run(contender, checkpoint, output))
            except RuntimeError as error:
                if not contender.is_peer:
                    raise
                print(f"{contender.title} does not work here and is left out: {error}", file=sys.stderr)
    return results


def run(contender: Contender, checkpoint: Generated, output: Path) -> Measurement:
    """Measure one run into a place that is empty, on a disk that is idle; compare what it wrote; remove it."""
    remove(output)
    os.sync()
    time.sleep(0.2)
    measured = measure(contender.command(checkpoint, output))
    if contender.dtype is not None:
        check(output, checkpoint.truth, contender.dtype)
    remove(output)
    return measured


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def print_table(chosen: list[Contender], results: list[list[Measurement]]) -> None:
    """Medians, in Markdown."""
    print("| | wall, s | of the baseline | spread | peak memory, MB |")
    print("|---|---:|---:|---:|---:|")
    for contender, result in zip(chosen, results, strict=True):
        if len(result) < len(results[0]):
            continue
        ratios = [one.seconds / baseline.seconds for one, baseline in zip(result, results[0], strict=True)]
        seconds, memory = median([one.seconds for one in result]), max([one.memory for one in result])
        spread = f"{min(ratios):.2f}–{max(ratios):.2f}"
        print(
            f"| {contender.title} | {seconds:.2f} | {median(ratios):.2f} | {spread} | {memory / 1e6:.0f} |", flush=True
        )


if __name__ == "__main__":
    main()
