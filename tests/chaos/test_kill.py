"""Killed at any moment, a merge leaves nothing that looks whole and is not, and the next one succeeds."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import merging
import pytest

from running import tree
from unshard.report.events import ignore
from unshard.run.local import run_plan
from unshard.run.occupants import MARKER
from unshard.settings import Settings

KILLS = 60
"""Random moments per test; two tests kill outright."""
INTERRUPTS = 15
LOADABLE = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    for rank in range(merging.RANKS):
        values = random.Random(rank).randbytes(merging.PIECE * merging.TENSORS)
        (directory / f"rank_{rank}").write_bytes(values)
    return directory


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    output = tmp_path_factory.mktemp("whole") / "out"
    merge(source, output)
    return tree(output)


OLD = {"config.json": b"old", "model-00001-of-00001.safetensors": b"old", "model.safetensors.index.json": b"old"}


def merge(source: Path, output: Path, *, overwrite: bool = False) -> None:
    run_plan(merging.build_plan(source), output, Settings(jobs=2), ignore, overwrite=overwrite)


def model_in(files: dict[str, bytes]) -> dict[str, bytes]:
    """What a loader sees: it knows nothing of our hidden files."""
    return {name: data for name, data in files.items() if not name.startswith(".unshard")}


def looks_whole(files: dict[str, bytes]) -> bool:
    """Whether a loader would take this for a model."""
    return any(name in files for name in LOADABLE)


def moments(count: int, longest: float) -> Iterator[float]:
    """Seconds to wait before the kill: spread over the whole run, at random within each part."""
    chosen = random.Random(0)
    for number in range(count):
        yield longest * (number + chosen.random()) / count


class Forked:
    """A merge in a forked child: no interpreter has to start, so that a hundred of them take seconds."""

    def __init__(
        self, source: Path, output: Path, *, overwrite: bool = False, before: Callable[[], None] = lambda: None
    ) -> None:
        ready, announce = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            try:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                before()
                os.write(announce, b"!")
                merge(source, output, overwrite=overwrite)
                os._exit(0)
            except KeyboardInterrupt:
                os._exit(130)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.read(ready, 1)
        os.close(ready)
        os.close(announce)

    def end(self, number: int) -> int:
        """Send a signal, wait, and give the exit code (negative: killed by that signal)."""
        os.kill(self.process, number)
        return self.wait()

    def wait(self) -> int:
        _, status = os.waitpid(self.process, 0)
        return os.waitstatus_to_exitcode(status)


def time_to_finish(source: Path, output: Path, *, overwrite: bool = False) -> float:
    """Seconds that an undisturbed merge takes, and a little more; the shortest of three: the machine may be busy."""
    shortest = 1e9
    for _ in range(3):
        shutil.rmtree(output, ignore_errors=True)
        if overwrite:
            fill(output)
        started = time.monotonic()
        assert Forked(source, output, overwrite=overwrite).wait() == 0
        shortest = min(shortest, time.monotonic() - started)
    shutil.rmtree(output)
    return shortest * 1.2


def fill(output: Path) -> None:
    output.mkdir()
    for name, data in OLD.items():
        (output / name).write_bytes(data)


@pytest.mark.slow
def test_killed_while_writing_into_a_new_directory(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    output = tmp_path / "out"
    outcomes = {"unfinished": 0, "whole": 0}
    for wait in moments(KILLS, time_to_finish(source, output)):
        child = Forked(source, output)
        time.sleep(wait)
        child.end(signal.SIGKILL)
        found = tree(output) if output.exists() else {}
        if looks_whole(found):
            assert model_in(found) == whole, f"looks whole after {wait:.4f} s, and is not"
        if found == whole:
            outcomes["whole"] += 1
        else:
            merge(source, output)
            assert tree(output) == whole
            outcomes["unfinished"] += 1
        shutil.rmtree(output)
    assert outcomes["unfinished"] >= KILLS // 4, f"the moments must lie inside the merge: {outcomes}"


@pytest.mark.slow
def test_killed_while_replacing_a_model(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    output = tmp_path / "out"
    for wait in moments(KILLS, time_to_finish(source, output, overwrite=True)):
        fill(output)
        child = Forked(source, output, overwrite=True)
        time.sleep(wait)
        child.end(signal.SIGKILL)
        found = tree(output)
        if looks_whole(found):
            assert model_in(found) in (OLD, whole), f"a mix after {wait:.4f} s"
        else:
            assert MARKER in found
        merge(source, output, overwrite=True)
        assert tree(output) == whole
        shutil.rmtree(output)


def die_at_step(last: int) -> None:
    """Let the process kill itself before its filesystem step number `last`, if it comes so far."""
    steps = itertools.count()

    def counted(real: Callable[..., object]) -> Callable[..., object]:
        def act(*arguments: object, **options: object) -> object:
            if next(steps) == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return act

    for owner, name in ((Path, "replace"), (Path, "unlink"), (Path, "mkdir"), (os, "fsync"), (os, "ftruncate")):
        setattr(owner, name, counted(getattr(owner, name)))


@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_before_every_step(source: Path, whole: dict[str, bytes], tmp_path: Path, overwrite: bool) -> None:
    output = tmp_path / "out"
    for step in itertools.count():
        if overwrite:
            fill(output)
        code = Forked(source, output, overwrite=overwrite, before=lambda step=step: die_at_step(step)).wait()
        found = tree(output) if output.exists() else {}
        if looks_whole(found):
            assert model_in(found) in ((OLD, whole) if overwrite else (whole,)), f"a mix before step {step}"
        if code == 0:
            break
        if model_in(found) != whole or MARKER in found:
            merge(source, output, overwrite=overwrite)
        assert tree(output) == whole
        shutil.rmtree(output)
    assert step > 30


def test_interrupted_while_writing(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    """Ctrl-C cleans up at once, and is passed on."""
    output = tmp_path / "out"
    interrupted = 0
    for wait in moments(INTERRUPTS, time_to_finish(source, output)):
        child = Forked(source, output)
        time.sleep(wait)
        code = child.end(signal.SIGINT)
        if code == 130:
            interrupted += 1
            found = tree(output) if output.exists() else {}
            assert found in ({}, whole)
        else:
            assert code == 0
            assert tree(output) == whole
        shutil.rmtree(output, ignore_errors=True)
    assert interrupted >= INTERRUPTS // 5, "the moments must lie inside the merge"


def test_interrupted_while_replacing(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    output = tmp_path / "out"
    for wait in moments(INTERRUPTS, time_to_finish(source, output, overwrite=True)):
        fill(output)
        child = Forked(source, output, overwrite=True)
        time.sleep(wait)
        child.end(signal.SIGINT)
        found = tree(output)
        assert found in (OLD, whole) or not looks_whole(found)
        merge(source, output, overwrite=True)
        assert tree(output) == whole
        shutil.rmtree(output)


def test_a_process_of_its_own(source: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    """The same with a fresh interpreter, as people run it."""
    output = tmp_path / "out"
    command = [sys.executable, merging.__file__, str(source), str(output)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for number in (signal.SIGKILL, signal.SIGINT, None):
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        time.sleep(0.02)
        if number is not None:
            process.send_signal(number)
        process.wait()
        process.stdout.close()
        found = tree(output) if output.exists() else {}
        assert found == whole if looks_whole(found) else number is not None
        if found == whole and number is not None:
            shutil.rmtree(output)
    assert tree(output) == whole
