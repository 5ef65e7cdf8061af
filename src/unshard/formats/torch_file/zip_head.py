"""The first bytes of an archive that torch.save wrote, where its end, and with it the directory, is out of reach.

Torch writes `data.pkl` first, then small members and the storages (`serialization.py`, `_save`), and leaves the sizes
in the local headers at zero. So the head tells where a tensor's elements begin, but proves nothing: whoever goes by it
must read the whole archive before the elements count.
"""

from __future__ import annotations

from unshard.errors import FormatError
from unshard.formats.torch_file.archive import LOCAL, STORED
from unshard.formats.torch_file.refusals import refuse_byte_order


class ZipHead:
    """The head of one archive. It is also the location of those storages that begin in it."""

    def __init__(self, head: bytes) -> None:
        self._head = head
        name_size = LOCAL.unpack_from(head)[9] if len(head) > LOCAL.size else 0
        name = head[LOCAL.size : LOCAL.size + name_size]
        payload = self._find(name) if name.endswith(b"/data.pkl") else None
        if payload is None:
            raise FormatError("no archive of torch.save: it does not begin with data.pkl")
        self._folder = name[: -len(b"data.pkl")]
        self._pickle_at = payload
        self._refuse_byte_order()

    @property
    def pickle(self) -> bytes:
        """The object's pickle, and what follows it."""
        return self._head[self._pickle_at :]

    def find(self, key: str, _nbytes: int, _numel: int) -> int:
        """The offset of a storage in the archive."""
        payload = self._find(self._folder + b"data/" + key.encode())
        if payload is None:
            raise FormatError(f"storage {key} does not begin within the first {len(self._head):,} bytes")
        return payload

    def _find(self, name: bytes) -> int | None:
        """Where the payload of the first stored member of this name begins."""
        at = self._head.find(name, LOCAL.size)
        while at >= 0:
            fields = LOCAL.unpack_from(self._head, at - LOCAL.size)
            if fields[0] == b"PK\x03\x04" and fields[3] == STORED and fields[9] == len(name):
                extra_size: int = fields[10]
                return at + len(name) + extra_size
            at = self._head.find(name, at + 1)
        return None

    def _refuse_byte_order(self) -> None:
        payload = self._find(self._folder + b"byteorder")
        if payload is not None and self._head.startswith(b"big", payload):
            raise refuse_byte_order()
