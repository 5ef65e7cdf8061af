"""The output directory: what is refused, and what is replaced."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from publishing import NEW, OLD, SETTINGS, fill, refuse, run
from running import copied_file, literal_file, plan, tree
from unshard.errors import OutputError
from unshard.plan.moves import Plan
from unshard.report.events import Event, Message
from unshard.run.local import run_plan
from unshard.run.occupants import MARKER
from unshard.run.preflight import check_output


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


def test_a_subdirectory_of_the_old_model_without_permission(
    todo: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found half-way, the old model would be gone."""
    output, real = fill(tmp_path / "out", OLD), os.access
    closed = output / "lora_adapter"
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed and real(path, mode))
    refuse(todo, output, "lora_adapter: no permission to write there", overwrite=True)


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
    strange |= {"lora_adapter_of_monday/adapter_model.safetensors": b"mine"}
    events: list[Event] = []
    run_plan(todo, fill(tmp_path / "out", {**OLD, **strange}), SETTINGS, events.append, overwrite=True)
    assert tree(tmp_path / "out") == {**NEW, **strange}
    (note,) = [event.text for event in events if isinstance(event, Message)]
    assert note == "left in place beside the model: lora_adapter_of_monday/, notes.txt, optimizer.pt, photos/"


def test_hundreds_of_strangers_are_not_all_listed(todo: Plan, tmp_path: Path) -> None:
    events: list[Event] = []
    output = fill(tmp_path / "out", {f"{number}.log": b"" for number in range(300)})
    run_plan(todo, output, SETTINGS, events.append, overwrite=True)
    (note,) = [event.text for event in events if isinstance(event, Message)]
    assert note.endswith(" and 292 more")


def _fail_after(count: int, number: int, real: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does its work `count` times, and fails with an error number from then on."""
    calls = [0]

    def act(*arguments: object) -> Any:
        calls[0] += 1
        if calls[0] > count:
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    return act


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
