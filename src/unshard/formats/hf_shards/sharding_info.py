"""What a file says of the pieces in it: where in their tensors they begin.

The member `DCP_SHARDING_INFO` of the metadata is a JSON text of its own, `{name: {"saved_offsets": [0, 64]}}` (torch
`distributed/checkpoint/filesystem.py`, `_write_files_from_queue`). The whole tensor's shape is nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping

from unshard.formats.json_text import JsonText

SHARDING_INFO = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"
_LIMIT = 2048
_MOST = 1 << 62


def parse_sharding_info(text: str) -> dict[str, tuple[int, ...]]:
    """Tensor name → the offsets of its piece. Raises ValueError where the text is malformed."""
    json = JsonText(text)
    offsets: dict[str, tuple[int, ...]] = {}
    for name in json.members():
        entry = json.value(_LIMIT)
        found = entry.get(_OFFSETS) if isinstance(entry, dict) else None
        if not isinstance(found, list) or not all(type(item) is int and 0 <= item < _MOST for item in found):
            raise ValueError(f"no {_OFFSETS} of {name[:200]!r}, but {str(entry)[:120]}")
        offsets[name] = tuple(found)
    json.expect_end()
    return offsets


def is_whole(metadata: Mapping[str, str]) -> bool:
    """Whether no piece in a file begins anywhere but at the beginning of its tensor.

    So it is in files of whole tensors, which the writer saves too (`save_distributed=False`). Raises ValueError.
    """
    return not any(any(offsets) for offsets in parse_sharding_info(metadata[SHARDING_INFO]).values())
