"""The output directory: what is refused, what is replaced, and that nothing half-done stays."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from running import copied_file, literal_file, plan, tree
from unshard.errors import OutputError, UnshardError
from unshard.plan.moves import Plan
from unshard.report.events import Event, Message, ignore
from unshard.run import preflight, writing
from unshard.run.local import run_plan
from unshard.run.occupants import MARKER, Marker, survey
from unshard.run.preflight import check_output
from unshard.run.publish import stage
from unshard.settings import Settings

SETTINGS = Settings(jobs=2)
OLD = {
    "config.json": b"old",
    "model-00001-of-00002.safetensors": b"old 1",
    "model-00002-of-00002.safetensors": b"old 2",
    "model.safetensors.index.json": b"old index",
    "pytorch_model.bin": b"old",
    "added_tokens.json": b"old",
    "lora_adapter/adapter_config.json": b"old",
    "lora_adapter/adapter_model.safetensors": b"old",
}
NEW = {"config.json": b"{}", "lora_adapter/adapter_config.json": b"{}", "model.safetensors": b"weights" * 1000}


@pytest.fixture
def todo(tmp_path: Path) -> Plan:
    (tmp_path / "shard").write_bytes(NEW["model.safetensors"])
    files = [literal_file(name, data) for name, data in NEW.items() if name != "model.safetensors"]
    return plan(tmp_path, *files, copied_file("model.safetensors", [("shard", 0, 7000)], last=True))


def fill(directory: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return directory


def run(todo: Plan, output: Path, *, overwrite: bool = False) -> None:
    run_plan(todo, output, SETTINGS, ignore, overwrite=overwrite)


def refuse(todo: Plan, output: Path, match: str, *, overwrite: bool = False) -> UnshardError:
    before = tree(output) if output.is_dir() else None
    with pytest.raises(UnshardError, match=match) as info:
        run(todo, output, overwrite=overwrite)
    assert (tree(output) if output.is_dir() else None) == before, "a refusal changes nothing"
    return info.value


# The directory -------------------------------------------------------------------------------------------------------


def test_into_nothing_into_empty_and_deep(todo: Plan, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for output in (tmp_path / "new", tmp_path / "empty", tmp_path / "a" / "b" / "c"):
        run(todo, output)
        assert tree(output) == NEW


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_modes_follow_the_umask(todo: Plan, tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        run(todo, tmp_path / "out")
    finally:
        os.umask(before)
    for path in [tmp_path / "out", *(tmp_path / "out").rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~mask, path


def test_through_a_link(todo: Plan, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    run(todo, tmp_path / "link")
    assert tree(tmp_path / "real") == NEW


def test_a_directory_that_is_not_empty_is_refused(todo: Plan, tmp_path: Path) -> None:
    error = refuse(todo, fill(tmp_path / "out", OLD), r"is not empty: it holds added_tokens\.json, config\.json")
    assert error.hint is not None
    assert "--overwrite" in error.hint


def test_a_foreign_directory_is_not_empty_either(todo: Plan, tmp_path: Path) -> None:
    (tmp_path / "out" / "photos").mkdir(parents=True)
    refuse(todo, tmp_path / "out", "it holds photos/")


def test_a_file_in_the_way(todo: Plan, tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"")
    refuse(todo, tmp_path / "out", "out: is not a directory")
    refuse(todo, tmp_path / "out" / "deeper", "out: is not a directory")


def test_a_directory_without_permission(todo: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    refuse(todo, tmp_path / "out", "no permission to write there")


def test_a_failure_to_make_the_directory_is_an_error_for_people(
    todo: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "out")

    monkeypatch.setattr(Path, "mkdir", fail)
    error = refuse(todo, tmp_path / "out", "out: cannot be written: Read-only file system")
    assert error.hint is not None


# Replacing -----------------------------------------------------------------------------------------------------------


def test_overwriting_leaves_no_stale_file(todo: Plan, tmp_path: Path) -> None:
    run(todo, fill(tmp_path / "out", OLD), overwrite=True)
    assert tree(tmp_path / "out") == NEW


def test_overwriting_drops_the_directory_of_an_adapter_that_is_no_more(tmp_path: Path) -> None:
    run(plan(tmp_path, literal_file("model.safetensors", b"w", last=True)), fill(tmp_path / "out", OLD), overwrite=True)
    assert tree(tmp_path / "out") == {"model.safetensors": b"w"}
    assert not (tmp_path / "out" / "lora_adapter").exists()


def test_overwriting_leaves_strangers_alone_and_says_so(todo: Plan, tmp_path: Path) -> None:
    strange = {"notes.txt": b"mine", "photos/cat.jpg": b"meow", "optimizer.pt": b"state"}
    events: list[Event] = []
    run_plan(todo, fill(tmp_path / "out", {**OLD, **strange}), SETTINGS, events.append, overwrite=True)
    assert tree(tmp_path / "out") == {**NEW, **strange}
    (note,) = [event.text for event in events if isinstance(event, Message)]
    assert note == "left in place beside the model: notes.txt, optimizer.pt, photos/"


def test_the_old_model_stays_until_the_new_one_is_complete(
    todo: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "out", OLD)
    monkeypatch.setattr(os, "ftruncate", _fail_after(1, errno.ENOSPC, os.ftruncate))
    with pytest.raises(OutputError, match="No space left"):
        run(todo, tmp_path / "out", overwrite=True)
    assert tree(tmp_path / "out") == OLD


def test_what_makes_the_old_model_whole_goes_first_and_the_new_comes_last(
    todo: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    real_unlink, real_replace = Path.unlink, Path.replace

    def unlink(self: Path, missing_ok: bool = False) -> None:
        steps.append(f"-{self.name}")
        real_unlink(self, missing_ok=missing_ok)

    def replace(self: Path, to: Path) -> Path:
        steps.append(f"+{to.name}")
        return real_replace(self, to)

    fill(tmp_path / "out", OLD)
    monkeypatch.setattr(Path, "unlink", unlink)
    monkeypatch.setattr(Path, "replace", replace)
    run(todo, tmp_path / "out", overwrite=True)
    assert steps[0] == "-model.safetensors.index.json"
    assert steps.index("-pytorch_model.bin") < steps.index("-config.json")
    assert steps[-2:] == ["+model.safetensors", f"-{MARKER}"]


def test_no_source_is_replaced_by_what_is_made_of_it(tmp_path: Path) -> None:
    fill(tmp_path, {"actor/model_0.pt": b"shard", "actor/huggingface/config.json": b"{}"})
    todo = plan(
        tmp_path,
        copied_file("config.json", [("actor/huggingface/config.json", 0, 2)]),
        copied_file("model.safetensors", [("actor/model_0.pt", 0, 5)], last=True),
    )
    output = tmp_path / "actor" / "huggingface"
    refuse(todo, output, "is not empty")
    refuse(todo, output, r"config\.json: is read from by this merge", overwrite=True)
    (tmp_path / "link").symlink_to(output)
    refuse(todo, tmp_path / "link", r"is read from by this merge", overwrite=True)


def test_a_weights_file_that_is_read_is_not_swept_away(tmp_path: Path) -> None:
    fill(tmp_path, {"out/old.safetensors": b"weights"})
    todo = plan(tmp_path, copied_file("model.safetensors", [("out/old.safetensors", 0, 7)], last=True))
    refuse(todo, tmp_path / "out", r"old\.safetensors: is read from", overwrite=True)


def test_into_the_source_directory_beside_its_files(tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(b"data")
    run(plan(tmp_path, copied_file("m", [("shard", 0, 4)], last=True)), tmp_path / "merged")
    assert tree(tmp_path) == {"shard": b"data", "merged/m": b"data"}


# Names ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../escape", "a/../../b", "a//b", "", ".", "a/./b", "a\\b", "nul\0", MARKER, "n" * 256]
)
def test_names_that_lead_elsewhere(tmp_path: Path, path: str) -> None:
    refuse(plan(tmp_path, literal_file(path, b"x")), tmp_path / "out", "no name for a file|twice|255 bytes")


def test_the_longest_name_is_possible(tmp_path: Path) -> None:
    run(plan(tmp_path, literal_file("n" * 255, b"x")), tmp_path / "out")
    assert tree(tmp_path / "out") == {"n" * 255: b"x"}


def test_two_files_of_one_name(tmp_path: Path) -> None:
    refuse(
        plan(tmp_path, literal_file("a", b"1"), literal_file("a", b"2")), tmp_path / "out", "`a` would be written twice"
    )


def test_a_subdirectory_that_leads_elsewhere(todo: Plan, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "lora_adapter").symlink_to(tmp_path / "elsewhere")
    refuse(todo, tmp_path / "out", "lora_adapter: is not a directory of its own", overwrite=True)


def test_a_directory_where_a_file_goes(todo: Plan, tmp_path: Path) -> None:
    (tmp_path / "out" / "config.json" / "x").mkdir(parents=True)
    refuse(todo, tmp_path / "out", r"config\.json: is a directory", overwrite=True)


def test_a_link_where_a_file_goes_is_replaced_not_followed(todo: Plan, tmp_path: Path) -> None:
    fill(tmp_path, {"precious": b"keep", "out/x": b""})
    (tmp_path / "out" / "config.json").symlink_to(tmp_path / "precious")
    run(todo, tmp_path / "out", overwrite=True)
    assert (tmp_path / "precious").read_bytes() == b"keep"
    assert not (tmp_path / "out" / "config.json").is_symlink()


def test_all_problems_are_told_at_once(todo: Plan, tmp_path: Path) -> None:
    todo = plan(tmp_path, *todo.files, literal_file("../x", b""), literal_file("config.json", b""))
    messages = [str(problem) for problem in check_output(todo, fill(tmp_path / "out", OLD), overwrite=False)]
    assert len(messages) == 3


# Room ----------------------------------------------------------------------------------------------------------------


def _fail_after(count: int, number: int, real: object) -> object:
    calls = [0]

    def act(*arguments: object) -> object:
        calls[0] += 1
        if calls[0] > count:
            raise OSError(number, os.strerror(number))
        return real(*arguments)  # type: ignore[operator]

    return act


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
