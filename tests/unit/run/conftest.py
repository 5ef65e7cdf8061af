from __future__ import annotations

from pathlib import Path

import pytest

from publishing import plan_new
from unshard.plan.moves import Plan


@pytest.fixture
def todo(tmp_path: Path) -> Plan:
    """The plan that writes `publishing.NEW`."""
    return plan_new(tmp_path)
