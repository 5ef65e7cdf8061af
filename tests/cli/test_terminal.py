"""What reaches a terminal, a log, a pipe that nobody reads, a full disk."""

from __future__ import annotations

import json
import os
import pty
import signal
import struct
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

from commands import run
from unshard.cli import main
from unshard.report.events import Advanced, Message, PhaseFinished, PhaseStarted
from unshard.report.printers import PeoplePrinter
from unshard.report.progress import LOG_EVERY, Lines, Phase

COMMAND = [sys.executable, "-m", "unshard"]


@pytest.fixture
def source(committed_golden: Path) -> Path:
    return committed_golden / "fsdp2_w4" / "ckpt"


@pytest.fixture
def sparse_model(tmp_path: Path) -> Path:
    """A model of 400 MB that takes no room on the disk, and a while to be cast."""
    model = tmp_path / "model"
    model.mkdir()
    size = 10_000_000
    names = [f"t{number}" for number in range(10)]
    header = {
        name: {"dtype": "F32", "shape": [size], "data_offsets": [number * size * 4, (number + 1) * size * 4]}
        for number, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (model / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + len(names) * size * 4)
    (model / "config.json").write_text('{"model_type": "strange"}')
    return model


def on_terminal(words: list[str], **environment: str) -> tuple[int, str]:
    """Run a command with a terminal for stdout and stderr; its exit code and all that it wrote there."""
    ours, theirs = pty.openpty()
    surroundings = {**os.environ, "TERM": "xterm-256color", **environment}
    surroundings = {name: value for name, value in surroundings.items() if value}
    process = subprocess.Popen(words, stdout=theirs, stderr=theirs, env=surroundings)
    os.close(theirs)
    written = b""
    while True:
        try:
            data = os.read(ours, 1 << 16)
        except OSError:  # Linux: the other side is closed
            break
        if not data:
            break
        written += data
    os.close(ours)
    return process.wait(), written.decode()


class TestTerminal:
    def test_colours(self, source: Path) -> None:
        code, written = on_terminal([*COMMAND, "inspect", str(source)], NO_COLOR="")
        assert code == 0
        assert "\x1b[" in written

    @pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb", "NO_COLOR": ""}], ids=str)
    def test_no_colours(self, environment: dict[str, str], source: Path, tmp_path: Path) -> None:
        for words in (["inspect", str(source)], ["merge", str(source), str(tmp_path / "out")], ["merg"], ["--help"]):
            _, written = on_terminal([*COMMAND, *words], **environment)
            assert written
            assert "\x1b" not in written, words

    def test_a_bar_shows_bytes_rate_and_time_left(self, sparse_model: Path, tmp_path: Path) -> None:
        program = (
            "import sys; from unshard.report import progress; progress.BARS_AFTER = 0.0;"
            "from unshard.cli import main; sys.exit(main(sys.argv[1:]))"
        )
        words = ["merge", str(sparse_model), str(tmp_path / "out"), "--dtype", "bf16", "--verify", "structure"]
        code, written = on_terminal([sys.executable, "-c", program, *words], NO_COLOR="1", COLUMNS="100")
        assert code == 0
        bar = next(line for line in reversed(written.split("\r")) if "Writing" in line)
        assert "/200.0 MB" in bar
        assert "B/s" in bar or "?" in bar
        assert written.index("Writing") < written.index("Merged into")
        assert written.rstrip().endswith("load it and ask it something")


class TestLog:
    def test_a_line_now_and_then(self) -> None:
        now, written = [100.0], list[str]()
        lines = Lines(written.append, lambda: now[0])
        phase = Phase("write", 10**9, lambda: now[0])
        for _ in range(40):
            now[0] += 1
            phase.done += 10**7
            lines.show(phase)
        assert len(written) == 40 // LOG_EVERY
        assert written[0] == "Writing: 100 MB of 1 GB (10 %), 10 MB/s, 1 min 30 s left"

    def test_a_phase_without_bytes(self) -> None:
        assert str(Phase("verify", 0, lambda: 5.0)) == "Verifying: 0 B of 0 B, 0 B/s"

    def test_nothing_but_messages_in_a_short_run(self, capsys: pytest.CaptureFixture[str]) -> None:
        with PeoplePrinter() as printer:
            printer.sink(PhaseStarted("write", 10))
            printer.sink(Advanced("write", 10))
            printer.sink(PhaseFinished("write", 0.1))
            printer.sink(Message("note", "look"))
        assert capsys.readouterr().err == "note: look\n"

    @pytest.mark.parametrize(
        ("options", "shown"),
        [
            ({}, "note: n\nwarning: w\n"),
            ({"quiet": True}, "warning: w\n"),
            ({"quiet": True, "verbose": True}, "note: n\nwarning: w\n"),
        ],
        ids=str,
    )
    def test_levels(self, options: dict[str, bool], shown: str, capsys: pytest.CaptureFixture[str]) -> None:
        printer = PeoplePrinter(**options)
        printer.sink(Message("note", "n"))
        printer.sink(Message("warning", "w"))
        assert capsys.readouterr().err == shown


class TestStreams:
    def test_a_reader_that_leaves(self, sparse_model: Path, tmp_path: Path) -> None:
        words = [*COMMAND, "merge", str(sparse_model), str(tmp_path / "out"), "--json", "--dtype", "bf16"]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stderr is not None
        assert '"phase-started"' in process.stdout.readline()
        process.stdout.close()
        assert process.wait() == 141
        assert process.stderr.read() == ""
        process.stderr.close()
        assert not (tmp_path / "out").exists()

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
    @pytest.mark.parametrize("options", [("inspect",), ("inspect", "--json"), ("--help",), ("--version",)], ids=str)
    def test_a_stdout_without_room(self, options: tuple[str, ...], source: Path) -> None:
        words = [*COMMAND, *options, *([str(source)] if options[0] == "inspect" else [])]
        with Path("/dev/full").open("w") as full:
            found = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert found.returncode == 7
        assert found.stderr == "error: stdout cannot be written to: No space left on device\n"

    @pytest.mark.parametrize("stream", ["stdout", "stderr"])
    def test_closed_streams(self, stream: str, source: Path, tmp_path: Path) -> None:
        number = {"stdout": 1, "stderr": 2}[stream]
        line = f'"$@" {number}>&-'
        words = ["sh", "-c", line, "sh", *COMMAND, "merge", str(source), str(tmp_path / "out")]
        found = subprocess.run(words, capture_output=True, text=True, check=False)
        assert found.returncode == 0
        assert "Traceback" not in found.stdout + found.stderr

    def test_letters_that_the_terminal_lacks(self, source: Path, tmp_path: Path) -> None:
        words = [*COMMAND, "merge", str(source), str(tmp_path / "out"), "--max-shard-size", "1kB"]
        surroundings = {**os.environ, "PYTHONIOENCODING": "ascii"}
        found = subprocess.run(words, capture_output=True, env=surroundings, check=False)
        assert found.returncode == 0
        assert rb"\u2026" in found.stdout


class TestStrangersNames:
    """Names from files and of files are data: no markup, no control characters."""

    NAME = "a[bold red]b[/]\x1b[2J\x07\u202e:smile:"

    @pytest.fixture
    def hostile(self, tmp_path: Path) -> Path:
        place = tmp_path / "dir[red]\x1b[31m"
        place.mkdir()
        header = json.dumps({"x[bold]y[/]": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
        (place / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
        (place / "config.json").write_text(json.dumps({"model_type": self.NAME, "architectures": [self.NAME]}))
        return place

    @pytest.mark.parametrize("options", [(), ("--tensors",), ("-v",)])
    def test_inspect(self, hostile: Path, options: tuple[str, ...]) -> None:
        code, stdout, _ = run("inspect", hostile, *options)
        assert code == 0
        assert r"a[bold red]b[/]\x1b[2J\x07\u202e:smile:" in stdout
        assert r"dir[red]\x1b[31m" in stdout
        assert stdout.replace("\n", "").isprintable()

    def test_merge_and_verify(self, hostile: Path, tmp_path: Path) -> None:
        out = tmp_path / "out[red]\x1b[31m"
        for words in (("merge", hostile, out), ("verify", out, "--against", hostile), ("plan", hostile, out)):
            _, stdout, stderr = run(*words)
            assert (stdout + stderr).replace("\n", "").isprintable()
            assert "[red]" in stdout

    def test_errors(self, tmp_path: Path) -> None:
        _, _, stderr = run("inspect", tmp_path / self.NAME)
        assert r"a[bold red]b[/]\x1b[2J" in stderr
        assert stderr.replace("\n", "").isprintable()

    def test_names_that_are_no_text(self, committed_golden: Path, tmp_path: Path) -> None:
        place = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
        place.symlink_to(committed_golden / "fsdp2_w4" / "ckpt")
        assert run("inspect", place).code == 0
        assert run("inspect", place, "--json").events[0]["event"] == "checkpoint"
        assert run("inspect", place / "nothing").code == 3

    def test_hints_can_be_pasted(self, tmp_path: Path) -> None:
        (tmp_path / "two words").mkdir()
        _, _, stderr = run("inspect", tmp_path / "two words" / "nothing")
        assert f"hint: ls '{tmp_path / 'two words'}'" in stderr


class TestInterruption:
    @pytest.mark.parametrize(
        ("number", "code", "word"),
        [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated"), (signal.SIGHUP, 143, "terminated")],
    )
    def test_while_writing(self, number: signal.Signals, code: int, word: str, sparse_model: Path) -> None:
        out = sparse_model.parent / "out"
        words = [*COMMAND, "merge", str(sparse_model), str(out), "--dtype", "bf16", "--jobs", "1"]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while not list(out.glob(".unshard-*.tmp")) and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(number)
        stdout, stderr = process.communicate()
        assert (process.returncode, stdout) == (code, "")
        assert stderr == f"error: {word}: `{out}` is as it was before\n"
        assert not out.exists()

    def test_while_verifying(self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def stop(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(import_module("unshard.verify.output"), "verify_output", stop)
        code, stdout, stderr = run("merge", source, tmp_path / "out")
        assert (code, stdout) == (130, "")
        assert "is complete, but was not verified to the end" in stderr
        assert f"hint: unshard verify {tmp_path / 'out'} --against {source}" in stderr
        monkeypatch.undo()
        assert run("verify", tmp_path / "out", "--against", source).code == 0

    def test_without_anything_written(self, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def stop(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("unshard.opening.open_checkpoint", stop)
        assert run("inspect", source).stderr == "error: interrupted\n"
        (event,) = run("inspect", source, "--json").events
        assert (event["code"], event["exit_code"]) == ("interrupted", 130)

    def test_the_handler_of_signals_is_given_back(self, source: Path) -> None:
        before = signal.getsignal(signal.SIGTERM)
        assert run("inspect", source).code == 0
        assert signal.getsignal(signal.SIGTERM) == before


class TestSurprises:
    """Errors that nobody foresaw are told in the same style."""

    @pytest.mark.parametrize(
        ("error", "code", "said"),
        [
            (ZeroDivisionError("oh"), 70, "this is a bug in unshard: ZeroDivisionError: oh"),
            (PermissionError(13, "Permission denied", "/secret"), 1, "/secret: Permission denied"),
            (MemoryError(), 1, "there is not enough memory"),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_are_told(
        self, error: Exception, code: int, said: str, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise error

        monkeypatch.setattr("unshard.opening.open_checkpoint", fail)
        outcome = run("inspect", source)
        assert outcome.code == code
        assert outcome.stderr.startswith(f"error: {said}\n")
        assert "Traceback" not in outcome.stderr
        assert "Traceback" in run("inspect", source, "--debug").stderr

    def test_debug_shows_where_foreseen_errors_come_from(self, tmp_path: Path) -> None:
        outcome = run("inspect", tmp_path / "nothing", "--debug")
        assert outcome.code == 3
        assert "Traceback" in outcome.stderr
        assert "error: " in outcome.stderr

    def test_an_unwritable_plan(self, source: Path, tmp_path: Path) -> None:
        outcome = run("plan", source, "--save", tmp_path / "no" / "plan.json")
        assert outcome.code == 7
        assert "the plan cannot be saved: No such file or directory" in outcome.stderr

    def test_a_plan_for_a_place_that_is_taken(self, source: Path, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        outcome = run("plan", source, tmp_path)
        assert outcome.code == 0
        assert "model.safetensors" in outcome.stdout
        assert "warning: a merge would be refused: " in outcome.stderr
        assert "is not empty" in outcome.stderr

    def test_help_of_every_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        for command in ("inspect", "plan", "merge", "verify", "test", "demo"):
            assert main([command, "--help"]) == 0
            assert "exit codes:" in capsys.readouterr().out
