"""The format that CONTRIBUTING.md shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest

import unshard.locate
from format_contract import check_format
from unshard.cli import main
from unshard.formats import FORMATS
from unshard.formats.contract import Source

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
ARRAYS = {
    "model.weight": numpy.arange(12, dtype=numpy.float32).reshape(3, 4),
    "model.columns": numpy.asfortranarray(numpy.arange(10, dtype=numpy.float16).reshape(5, 2)),
    "model.steps": numpy.array(7, dtype=numpy.int64),
}


@pytest.fixture
def example() -> Any:
    """An instance of the example's format."""
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(code.splitlines()) < 100
    module = ModuleType("example")
    exec(compile(code, "CONTRIBUTING.md", "exec"), module.__dict__)
    return module.NumpyDirectory()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A checkpoint of that format."""
    place = tmp_path / "arrays"
    place.mkdir()
    for name, array in ARRAYS.items():
        numpy.save(place / f"{name}.npy", array)
    return place


def test_it_keeps_the_contract(example: Any, directory: Path, tmp_path: Path) -> None:
    check_format(example, directory, tmp_path)


def test_it_merges(example: Any, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    monkeypatch.setattr(unshard.locate, "FORMATS", (*FORMATS, example))
    assert main(["merge", str(directory), str(tmp_path / "merged"), "--weights-only"]) == 0
    merged = safetensors.load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        numpy.testing.assert_array_equal(merged[name], array, strict=True)


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY\x01\x00", b"PK\x03\x04"])
def test_what_is_no_array_is_named(example: Any, directory: Path, content: bytes) -> None:
    (directory / "broken.npy").write_bytes(content)
    (problem,) = example.read(Source(directory)).problems
    assert "broken.npy" in str(problem)
