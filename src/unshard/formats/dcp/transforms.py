"""What a writer did to the bytes of an item on their way to the file: nothing, compression, extensions of users."""

from __future__ import annotations

from collections.abc import Sequence

from unshard.errors import FormatError

_HINT = "load the checkpoint with torch and save it without extensions"


def refuse_transforms(transforms: Sequence[str], what: str) -> None:
    """Raises FormatError unless the bytes lie in the file as they are."""
    if transforms:
        names = ", ".join([repr(name[:80]) for name in transforms])
        raise FormatError(f"{what}: was written through {names}, which is not undone here", hint=_HINT)
