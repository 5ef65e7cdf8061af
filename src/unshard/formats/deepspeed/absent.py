"""What is said of files that are missing."""

from __future__ import annotations

from collections.abc import Sequence

from unshard.words import items_in_words

FETCH = "fetch these files, or name the place where they are with --also DIR (node-local disks)"


def missing_in_words(names: Sequence[str], whole: str) -> str:
    """(["a", "b"], "8 files of experts") → "2 of 8 files of experts are missing: no a, b"."""
    return f"{len(names):,} of {whole} {'is' if len(names) == 1 else 'are'} missing: no {items_in_words(names)}"
