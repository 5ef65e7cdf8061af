"""What all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

import golden_set

settings.register_profile("unshard", deadline=None)  # an example may be slow on a busy machine without being wrong
settings.load_profile("unshard")


@pytest.fixture(scope="session")
def committed_golden() -> Path:
    """The directory of the committed golden checkpoints, one folder per case."""
    return golden_set.COMMITTED


@pytest.fixture(scope="session")
def larger_golden() -> Path:
    """The larger golden set: a directory with `cases/` and `old_torch/`. The test is skipped where there is none."""
    root = golden_set.larger_set()
    if root is None:
        pytest.skip(f"{golden_set.VARIABLE} does not point to the larger golden set")
    return root
