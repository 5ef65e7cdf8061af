"""The arrows of docs/design.md go one way: what the rooms may know of each other, and of the machine."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import unshard

PACKAGE = Path(unshard.__file__).parent

VALUES = {
    "checkpoint", "dtypes", "errors", "model", "model_files", "options", "parallel", "settings", "target", "tensors",
    "words",
}  # fmt: skip
"""What travels along the road, and the words for it: every room may know these."""

MAY_KNOW = {
    "tensors": {"dtypes"},
    "formats": {*VALUES, "files", "model_config", "wrappers"},
    "adapters": {*VALUES, "model_config", "run.functions"},
    "families": {*VALUES, "model_config", "run.functions", "wrappers"},
    "plan": VALUES,
    "run": {*VALUES, "files", "plan", "report.events", "report.meter"},
}
"""Room → the rooms and modules that it may import. What reports, verifies and takes commands may know all of them."""

NEVER = {"torch", "transformers", "peft", "accelerate", "deepspeed", "megatron", "verl"}
TOUCH_FILES = {"os", "io", "mmap", "shutil", "tempfile", "unshard.files"}
CALLS_ON_FILES = {"open", "read_bytes", "read_text", "write_bytes", "write_text", "iterdir", "exists", "stat"}


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "unshard":
            yield from (f"unshard.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def modules_of(room: str) -> list[Path]:
    found = sorted((PACKAGE / room).rglob("*.py"))
    assert found, room
    return found


@pytest.mark.parametrize("room", MAY_KNOW)
def test_a_room_knows_only_what_comes_before_it(room: str) -> None:
    for path in modules_of(room):
        for name in imports_of(path):
            inside = name.removeprefix("unshard.")
            if name == inside or inside.split(".")[0] == room:
                continue
            known = any(inside == allowed or inside.startswith(f"{allowed}.") for allowed in MAY_KNOW[room])
            assert known, f"{path.relative_to(PACKAGE)} imports {name}"


@pytest.mark.parametrize("room", ["tensors", "families", "plan"])
def test_what_is_thought_out_touches_no_file(room: str) -> None:
    for path in modules_of(room):
        assert TOUCH_FILES.isdisjoint(imports_of(path)), path
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
                assert name not in CALLS_ON_FILES, f"{path.relative_to(PACKAGE)}:{node.lineno} calls {name}"


def test_no_framework_is_imported() -> None:
    """But for `LazyTensor.torch()`, which a person must call."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if "demo_data" not in path.parts and path.name != "lazy.py":
            roots = {name.partition(".")[0] for name in imports_of(path)}
            assert roots.isdisjoint(NEVER), path


def test_modules_are_short() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, path
