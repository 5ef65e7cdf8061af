"""What a writer did to the bytes of an item on their way to the file: nothing, compression, extensions of users.

Facts: torch `distributed/checkpoint/_extension.py` (since 2.7). A descriptor is `NAME[@DOMAIN][/VERSION]`; torch reads
those of its own `ZStandard` by the exact name and the version up to its first dot.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from unshard.errors import FormatError, UsageError
from unshard.files.zstd import check_library

_ZSTANDARD = re.compile(r"stream\.zstd/1(\..*)?", re.DOTALL)
_HINT = "load the checkpoint with torch and save it without extensions"


class TransformError(FormatError):
    """Items that cannot be read for how they were written. The message says how, and completes "N tensors are …"."""


def encoding_of(transforms: Sequence[str]) -> str | None:
    """How the bytes of an item are encoded: "zstd", or None where they lie in the file as they are.

    Raises TransformError for everything else, and where no library that decodes zstd is installed.
    """
    if not transforms:
        return None
    if len(transforms) > 1 or not _ZSTANDARD.fullmatch(transforms[0]):
        names = ", ".join([repr(name[:80]) for name in transforms])
        raise TransformError(f"written through {names}, which is not undone here", hint=_HINT)
    try:
        check_library()
    except UsageError as error:
        raise TransformError(error.message, hint=error.hint) from None
    return "zstd"
