"""`--json`: stdout holds nothing but JSON lines, each of a known kind with the members that the reference tells."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from commands import Outcome, run

Number = (int, float)
NOTE = {"level": str, "text": str, "tensors": list}
PROBLEM = {"code": str, "message": str, "hint": (str, type(None))}

EVENTS: dict[str, dict[str, Any]] = {
    "phase-started": {"phase": str, "total_bytes": int},
    "progress": {
        "phase": str, "bytes": int, "total_bytes": int, "bytes_per_second": int,
        "seconds_left": (*Number, type(None)),
    },
    "phase-finished": {"phase": str, "bytes": int, "seconds": Number},
    "message": {"level": str, "text": str},
    "error": {**PROBLEM, "exit_code": int, "problems": [PROBLEM]},
    "version": {"version": str},
    "demo": {"output": str},
    "checkpoint": {
        "format": str, "title": str, "roots": dict, "world_size": (int, type(None)),
        "mesh": [{"name": str, "size": int}], "placements": dict, "bytes": int, "tensors": dict,
        "architecture": (str, type(None)), "adapter": (dict, type(None)), "assets": list, "skipped": dict,
        "facts": dict, "encodings": dict, "weights": (str, type(None)), "excluded": dict, "notes": [NOTE],
        "problems": [PROBLEM],
    },
    "plan": {"plan": dict, "notes": [NOTE], "dropped": dict},
    "report": {
        "source": str, "output": str, "checkpoint": str, "weights": (str, type(None)), "family": (str, type(None)),
        "is_adapter": bool, "tensors": int, "parameters": int, "bytes": int, "files": [{"path": str, "bytes": int}],
        "seconds": Number, "write_seconds": Number, "bytes_per_second": int, "peak_memory_bytes": int,
        "verification": {
            "mode": str, "bytes_compared": int, "seconds": Number, "proven": list, "not_proven": list,
        },
        "notes": [NOTE],
        "rounded": [{"tensor": str, "from": str, "to": str, "elements": int, "nan": int, "overflow": int}],
        "dropped": dict, "skipped": dict,
    },
    "verdict": {
        "holds": bool, "output": str, "against": (str, type(None)), "family": (str, type(None)), "tensors": int,
        "bytes": int, "proven": list, "not_proven": list, "notes": [NOTE], "hint": (str, type(None)),
        "comparison": (dict, type(None)),
    },
}  # fmt: skip
COMPARISON: dict[str, Any] = {
    "bytes": int, "seconds": Number, "only_in_output": list, "only_in_against": list,
    "settings": [{"file": str, "key": str, "output": object, "against": object}],
    "tensors": [
        {
            "tensor": str, "shapes": list, "dtypes": list, "identical": bool,
            "max_difference": (*Number, str, type(None)), "cosine": (*Number, str, type(None)),
            "failure": (str, type(None)),
        }
    ],
}  # fmt: skip


def check(value: Any, schema: Any, where: str) -> None:
    if isinstance(schema, dict):
        assert set(value) == set(schema), where
        for key, inner in schema.items():
            check(value[key], inner, f"{where}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list), where
        for item in value:
            check(item, schema[0], f"{where}[]")
    else:
        assert isinstance(value, schema), f"{where}: {value!r}"


def check_all(outcome: Outcome) -> list[dict[str, Any]]:
    """All events of a command, each checked against the schema."""
    assert outcome.stderr == ""
    events = outcome.events
    for event in events:
        name = event.pop("event")
        check(event, EVENTS[name], name)
        if name == "verdict" and event["comparison"]:
            check(event["comparison"], COMPARISON, "comparison")
        event["event"] = name
    return events


@pytest.fixture
def case(committed_golden: Path) -> Path:
    return committed_golden / "lora"


def test_inspect(case: Path) -> None:
    (event,) = check_all(run("inspect", case / "ckpt", "--json"))
    assert event["world_size"] == 2
    assert len(event["tensors"]) == 18


def test_inspect_with_problems(case: Path, tmp_path: Path) -> None:
    shutil.copytree(case / "ckpt", tmp_path / "ckpt")
    (tmp_path / "ckpt" / "model_world_size_2_rank_1.pt").unlink()
    outcome = run("inspect", tmp_path / "ckpt", "--json")
    (event,) = check_all(outcome)
    assert outcome.code == 5
    assert [problem["code"] for problem in event["problems"]] == ["incomplete"]


def test_plan(case: Path, tmp_path: Path) -> None:
    (event,) = check_all(run("plan", case / "ckpt", "--json", "--save", tmp_path / "plan.json"))
    assert event["plan"] == json.loads((tmp_path / "plan.json").read_text())
    assert event["plan"]["format"] == "unshard-plan"


@pytest.mark.parametrize("options", [(), ("--fuse-lora",), ("--adapter-only",), ("--dtype", "bf16")])
def test_merge(options: tuple[str, ...], case: Path, tmp_path: Path) -> None:
    events = check_all(run("merge", case / "ckpt", tmp_path / "out", "--json", "--low_cpu_mem_usage", *options))
    assert events[0]["event"] == "message"
    phases = [event["phase"] for event in events if event["event"] == "phase-started"]
    assert phases == ["write", "verify"]
    report = events[-1]
    assert report["event"] == "report"
    assert report["bytes"] == sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())
    written = next(event for event in events if event["event"] == "phase-finished")
    assert written["bytes"] == report["bytes"]


def test_verify(committed_golden: Path) -> None:
    case = committed_golden / "fsdp2_w4"
    (event,) = check_all(run("verify", case / "truth", "--json"))
    assert event["comparison"] is None
    *_, event = check_all(run("verify", case / "truth", "--against", case / "ckpt", "--json"))
    assert (event["event"], event["holds"]) == ("verdict", True)


def test_a_verdict_that_does_not_hold(case: Path, committed_golden: Path) -> None:
    outcome = run("test", case / "ckpt", committed_golden / "fsdp2_mixtral" / "truth", "--json")
    *_, verdict, error = check_all(outcome)
    assert (verdict["event"], verdict["holds"]) == ("verdict", False)
    assert (error["event"], error["exit_code"]) == ("error", 8)
    assert outcome.code == 8


def test_demo(tmp_path: Path) -> None:
    *events, last = check_all(run("demo", tmp_path / "demo", "--json"))
    assert [event["event"] for event in events].count("report") == 2
    assert last == {"event": "demo", "output": str(tmp_path / "demo" / "model")}


def test_version() -> None:
    (event,) = check_all(run("--version", "--json"))
    assert re.fullmatch(r"\d+\.\d+.*", event["version"])


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ((), 2),
        (("merg",), 2),
        (("merge",), 2),
        (("merge", "nothing", "out"), 3),
        (("merge", "a", "b", "--dtype", "int8"), 2),
        (("merge", "a", "b", "--dtpye", "bf16"), 2),
        (("inspect", "/etc/passwd"), 3),
        (("inspect", "a", "b"), 2),
        (("verify", "nothing"), 3),
        (("test",), 2),
    ],
)
@pytest.mark.parametrize("option", ["--json", "--js"])
def test_errors(words: tuple[str, ...], code: int, option: str) -> None:
    outcome = run(*words, option)
    (event,) = check_all(outcome)
    assert (event["event"], event["exit_code"], outcome.code) == ("error", code, code)


def test_errors_of_several_parts(case: Path, tmp_path: Path) -> None:
    shutil.copytree(case / "ckpt", tmp_path / "ckpt")
    for file in (tmp_path / "ckpt").glob("*.pt"):
        file.write_bytes(file.read_bytes()[:100])
    (event,) = check_all(run("merge", tmp_path / "ckpt", tmp_path / "out", "--json"))
    assert len(event["problems"]) == 2


def test_common_options_may_stand_before_the_command(case: Path) -> None:
    (event,) = check_all(run("--json", "-q", "inspect", case / "ckpt"))
    assert event["event"] == "checkpoint"


def test_the_reference_tells_every_event_and_member() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text()
    for name, members in {**EVENTS, "comparison": COMPARISON}.items():
        assert f"`{name}`" in text
        for member in members:
            assert f"`{member}`" in text, f"{name}.{member}"
