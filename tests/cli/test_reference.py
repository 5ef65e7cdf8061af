"""docs/reference holds what the code has: every option, every exit code, every keyword."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from pathlib import Path

import pytest

import unshard
from unshard.cli import COMMANDS, troubles
from unshard.cli.parser import EPILOG, build_overview, build_parser
from unshard.errors import UnshardError
from unshard.options import MergeOptions

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


@pytest.fixture(scope="module")
def text() -> str:
    return (REFERENCE / "cli.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_told(command: str, text: str) -> None:
    parser = build_parser(command, "", import_module(f"unshard.cli.{command}").describe)
    for option in parser.spellings:
        assert f"`{option}" in text or option in ("-h", "--help"), option


def test_every_command_is_told(text: str) -> None:
    assert all(f"unshard {command}" in text for command in COMMANDS)
    overview = " ".join(build_overview(list(COMMANDS.items())).format_help().split())
    assert all(f"{command} {line}" in overview for command, line in COMMANDS.items())


def _kinds(base: type[UnshardError]) -> list[type[UnshardError]]:
    return [base, *[kind for child in base.__subclasses__() for kind in _kinds(child)]]


def test_every_exit_code_and_kind_of_error_is_told(text: str) -> None:
    kinds = [kind for kind in _kinds(UnshardError) if kind is not UnshardError]
    assert len(kinds) >= 11
    for kind in kinds:
        assert f"| {kind.exit_code} |" in text, kind
        assert str(kind.exit_code) in EPILOG, kind
        assert f"`{kind.code}`" in text, kind
    assert f"| {troubles.CLOSED_PIPE} |" in text


def test_every_keyword_of_python_is_told() -> None:
    text = (REFERENCE / "python.md").read_text(encoding="utf-8")
    for field in dataclasses.fields(MergeOptions):
        assert f"`{field.name}`" in text, field.name
    for name in unshard.__all__:
        assert f"unshard.{name}" in text or name == "__version__", name
