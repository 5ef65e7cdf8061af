"""A small model to publish, an old one that lies in its way, and what a refusal must leave as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from running import copied_file, literal_file, plan, tree
from unshard.errors import UnshardError
from unshard.plan.moves import Plan
from unshard.report.events import ignore
from unshard.run.local import run_plan
from unshard.settings import Settings

SETTINGS = Settings(jobs=2)
OLD = {
    "config.json": b"old",
    "model-00001-of-00002.safetensors": b"old 1",
    "model-00002-of-00002.safetensors": b"old 2",
    "model.safetensors.index.json": b"old index",
    "pytorch_model.bin": b"old",
    "added_tokens.json": b"old",
    "vocab_extra.json": b"old",
    "lora_adapter/adapter_config.json": b"old",
    "lora_adapter/adapter_model.safetensors": b"old",
}
NEW = {"config.json": b"{}", "lora_adapter/adapter_config.json": b"{}", "model.safetensors": b"weights" * 1000}


def plan_new(directory: Path) -> Plan:
    """The plan that writes NEW, from a shard in this directory."""
    (directory / "shard").write_bytes(NEW["model.safetensors"])
    files = [literal_file(name, data) for name, data in NEW.items() if name != "model.safetensors"]
    return plan(directory, *files, copied_file("model.safetensors", [("shard", 0, 7000)], last=True))


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
