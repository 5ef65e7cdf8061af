"""Python's collector of reference cycles, and when to leave it off."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Look for no reference cycles inside the `with`: for what builds many objects that all stay.

    Catalogs and plans are such: a million boxes, extents and chunks without a cycle, through which the collector walks
    again and again while they grow. Without it, a model of 671B parameters on 1024 ranks is read and planned in two
    thirds of the time, and in the same memory. Around a function, this is its decorator.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
