"""The collector of cycles is off where catalogs are built, and afterwards as it was."""

from __future__ import annotations

import gc

import pytest

from unshard.collector import collector_paused


@pytest.fixture(autouse=True)
def enabled():
    gc.enable()
    yield
    gc.enable()


def test_it_is_off_inside_and_on_again_behind_errors_too() -> None:
    @collector_paused()
    def fail() -> None:
        raise KeyError(gc.isenabled())

    with pytest.raises(KeyError, match="False"):
        fail()
    assert gc.isenabled()


def test_it_stays_off_where_somebody_else_wants_it_off() -> None:
    gc.disable()
    with collector_paused():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_it_may_be_nested_and_is_a_decorator() -> None:
    @collector_paused()
    def look() -> bool:
        return gc.isenabled()

    with collector_paused():
        assert not look()
        assert not gc.isenabled()
    assert not look()
    assert gc.isenabled()
