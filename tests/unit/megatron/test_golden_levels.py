"""Every Megatron checkpoint of the larger golden set is found from every level of its tree."""

from __future__ import annotations

from pathlib import Path

import pytest

import golden_set
from unshard.locate import locate


def checkpoints() -> list[Path]:
    """The directories that are given to `unshard merge`; none where there is no larger set."""
    root = golden_set.larger_set()
    return sorted(root.glob("cases/mc_*/ckpt")) if root is not None else []


@pytest.mark.parametrize("checkpoint", checkpoints(), ids=lambda path: path.parent.name)
def test_from_every_level(checkpoint: Path) -> None:
    found, place = locate(checkpoint)
    assert "megatron" in found.name
    levels = [path for path in checkpoint.rglob("*") if "huggingface" not in path.parts and path.suffix != ".txt"]
    assert len(levels) > 3
    for level in levels:
        kind, where = locate(level)
        assert kind.name == found.name, level
        assert where == place or place in where.parents, level
