"""The package as `import unshard` gives it."""

from __future__ import annotations

from importlib import import_module

import pytest

import unshard


@pytest.mark.parametrize("name", ["merge", "open", "plan", "verify"])
def test_public_functions_stay_functions_whatever_rooms_were_imported(name: str) -> None:
    """`unshard.plan` and `unshard.verify` are rooms too, and Python makes imported rooms attributes of the package."""
    for room in ("unshard.plan.moves", "unshard.verify.compare"):
        import_module(room)
    assert callable(getattr(unshard, name))
    assert name in unshard.__all__
