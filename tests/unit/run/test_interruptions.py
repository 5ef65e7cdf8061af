"""Full disks, leftovers and Ctrl-C: nothing half-done stays."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from threading import Thread, get_ident

import pytest

from publishing import NEW, OLD, SETTINGS, fill, refuse, run
from running import copied_file, literal_file, plan, tree
from unshard.errors import OutputError
from unshard.plan.moves import Plan
from unshard.report.events import PhaseFinished
from unshard.run import preflight, writing
from unshard.run.local import run_plan
from unshard.run.occupants import MARKER, Marker, survey
from unshard.run.publish import Staging, stage
from unshard.run.threads import hold_interrupts

# Room ----------------------------------------------------------------------------------------------------------------


def free_space(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    real = os.statvfs

    def act(path: object) -> os.statvfs_result:
        return os.statvfs_result((4096, 4096, 1000, blocks, blocks, *list(real(path))[5:]))  # type: ignore[call-overload]

    monkeypatch.setattr(os, "statvfs", act)


def test_too_little_disk_is_foreseen(todo: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_space(monkeypatch, 3)
    refuse(todo, tmp_path / "out", r"16\.4 kB are needed, 12\.3 kB are free")
    free_space(monkeypatch, 4)
    run(todo, tmp_path / "out")


def test_the_old_model_counts_as_occupied(todo: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "out", {"model.safetensors": b"x" * 100_000})
    free_space(monkeypatch, 1)
    error = refuse(todo, tmp_path / "out", "are needed", overwrite=True)
    assert error.hint is not None
    assert "removing the old model" in error.hint


def test_leftovers_count_as_free(todo: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "out", {MARKER: Marker().encode(), ".unshard-abc-0.tmp": b"x" * 100_000})
    free_space(monkeypatch, 1)
    run(todo, tmp_path / "out")
    assert tree(tmp_path / "out") == NEW


CALLS = {"pwrite": 3, "ftruncate": 4, "copy_file_range": 1, "fsync": 5}
"""How often the plan makes them, at least: the marker, two literals, three files, one copy."""


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("after", range(5))
def test_a_full_disk_in_the_middle(
    todo: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, after: int
) -> None:
    calls = [0]
    real = getattr(os, call)

    def full(*arguments: object) -> object:
        calls[0] += 1
        if calls[0] > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    monkeypatch.setattr(os, call, full)
    if after >= CALLS[call]:
        run(todo, tmp_path / "out")
        assert tree(tmp_path / "out") == NEW
        return
    error = refuse(todo, tmp_path / "out", "No space left on device")
    assert error.hint is not None
    assert not (tmp_path / "out").exists()


def test_a_limit_of_file_sizes(tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(bytes(200_000))
    todo = plan(tmp_path, copied_file("m", [("shard", 0, 200_000)], last=True))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        error = refuse(todo, tmp_path / "out", "m: cannot be written: File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.hint is not None
    assert "ulimit" in error.hint


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounting a small disk takes root on Linux")
def test_a_disk_that_is_really_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shard").write_bytes(os.urandom(3 << 20))
    (tmp_path / "disk").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path / "disk"], check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        todo = plan(tmp_path, literal_file("config.json", b"{}"), copied_file("m", [("shard", 0, 3 << 20)], last=True))
        refuse(todo, tmp_path / "disk" / "out", r"3\.15 MB are needed, 1\.05 MB are free")
        monkeypatch.setattr(preflight, "_check_room", lambda *_: ())
        refuse(todo, tmp_path / "disk" / "out", "m: cannot be written: No space left on device")
        assert tree(tmp_path / "disk") == {}
    finally:
        subprocess.run(["umount", tmp_path / "disk"], check=True)


# Interrupted ---------------------------------------------------------------------------------------------------------


def test_leftovers_of_a_killed_run_are_no_obstacle(todo: Plan, tmp_path: Path) -> None:
    marker = Marker(("config.json", "model-00001-of-00009.safetensors", "lora_adapter/adapter_config.json")).encode()
    for rest in (marker, b"", marker[:20], b"[]", b'{"files": 3}'):
        output = tmp_path / f"out{len(rest)}"
        fill(output, {MARKER: rest, ".unshard-12345678-0.tmp": b"half"})
        if rest == marker:
            fill(output, {"config.json": b"old", "model-00001-of-00009.safetensors": b"old"})
            fill(output, {"lora_adapter/adapter_config.json": b"old"})
        run(todo, output)
        assert tree(output) == NEW


def test_a_marker_is_no_licence_for_strangers(todo: Plan, tmp_path: Path) -> None:
    fill(tmp_path / "out", {MARKER: Marker(("config.json",)).encode(), "config.json": b"", "thesis.tex": b"mine"})
    refuse(todo, tmp_path / "out", r"it holds thesis\.tex")
    run(todo, tmp_path / "out", overwrite=True)
    assert tree(tmp_path / "out") == {**NEW, "thesis.tex": b"mine"}


def test_a_pipe_named_like_the_marker_is_not_waited_for(todo: Plan, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "out" / MARKER)
    with pytest.raises(OutputError, match="cannot be written"):
        run(todo, tmp_path / "out")


def test_two_runs_into_one_directory(todo: Plan, tmp_path: Path) -> None:
    with stage(tmp_path / "out", todo.files, overwrite=False):
        before = tree(tmp_path / "out")
        with pytest.raises(OutputError, match="another unshard is writing"):
            run(todo, tmp_path / "out")
        assert tree(tmp_path / "out") == before
    assert set(tree(tmp_path / "out")) == {MARKER}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("step", ["replace", "unlink", "mkdir"])
@pytest.mark.parametrize("after", range(6))
def test_interrupted_while_publishing(
    todo: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool, step: str, after: int
) -> None:
    output = fill(tmp_path / "out", OLD) if overwrite else tmp_path / "out"
    real, calls = getattr(Path, step), [0]

    def interrupted(self: Path, *arguments: object, **options: object) -> object:
        calls[0] += 1
        if calls[0] == after + 1:
            raise KeyboardInterrupt
        return real(self, *arguments, **options)

    monkeypatch.setattr(Path, step, interrupted)
    try:
        run(todo, output, overwrite=overwrite)
    except KeyboardInterrupt:
        monkeypatch.undo()
        found = tree(output) if output.exists() else {}
        assert found in ({}, OLD) or not _looks_whole(found), "all, nothing, or clearly neither"
        run(todo, output, overwrite=overwrite)
    assert tree(output) == NEW


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("step", ["replace", "unlink"])
def test_an_interrupt_waits_until_a_model_is_published(
    todo: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool, step: str
) -> None:
    """Half-way, the old model is gone and the new one has no names yet: both would be lost."""
    output, events = fill(tmp_path / "out", OLD if overwrite else {}), []
    real = getattr(Path, step)

    def interrupted(self: Path, *arguments: object, **options: object) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        return real(self, *arguments, **options)

    monkeypatch.setattr(Path, step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_plan(todo, output, SETTINGS, events.append, overwrite=overwrite)
    assert isinstance(events[-1], PhaseFinished)
    assert tree(output) == NEW


def test_an_interrupt_while_cleaning_up_waits_too(todo: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Impatient people press Ctrl-C more than once."""
    real = Staging.abandon

    def interrupted(self: Staging) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        real(self)

    monkeypatch.setattr(Staging, "abandon", interrupted)
    monkeypatch.setattr(writing.Output, "finish", lambda _: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        run(todo, tmp_path / "a" / "out")
    assert not (tmp_path / "a").exists()


def test_interrupts_are_held_whichever_thread_they_come_to() -> None:
    """The kernel may give a signal to any thread that does not block it."""
    done = []
    with pytest.raises(KeyboardInterrupt), hold_interrupts():  # noqa: PT012
        sender = Thread(target=lambda: signal.pthread_kill(get_ident(), signal.SIGINT))
        sender.start()
        sender.join()
        done.append("all")
    assert done == ["all"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _looks_whole(files: dict[str, bytes]) -> bool:
    weights = {"model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"}
    return MARKER not in files and bool(weights & set(files))


def test_an_interrupt_while_writing_leaves_nothing(todo: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writing.Output, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(todo, tmp_path / "a" / "out")
    assert not (tmp_path / "a").exists()


def test_a_survey_of_nothing(tmp_path: Path) -> None:
    assert survey(tmp_path / "nowhere", ["a"]).is_empty
