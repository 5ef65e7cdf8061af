"""The zip archives of torch.save (since 1.6), as object and storages.

All members lie in one folder of any name: `data.pkl` (the object), `data/KEY` (the storages), `byteorder` (since 2.1),
and some that do not matter here (`version`, `.format_version`, `.storage_alignment`, `.data/serialization_id`).
"""

from __future__ import annotations

import zlib

from unshard.errors import FormatError
from unshard.formats.torch_file.archive import STORED, Archive
from unshard.formats.torch_file.refusals import AGAIN, refuse_byte_order

READ_AT_ONCE = 1 << 20
SAVE_AGAIN = "load it with torch.load and save it again with torch.save"


class TorchZip:
    """One archive that torch.save wrote. It is also the location of its storages."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self.folder = _find_folder(archive)
        self._refuse_other_uses()

    def read_pickle(self, limit: int) -> bytes:
        """The object's pickle, of at most `limit` bytes."""
        return self._archive.read(self.folder + b"data.pkl", limit)

    def find(self, key: str, nbytes: int, numel: int) -> int:
        """The absolute offset of a storage of `nbytes` bytes."""
        name = self.folder + b"data/" + key.encode()
        member = self._archive.members.get(name)
        if member is None:
            raise FormatError(f"storage {key} is missing from the archive")
        if member.method != STORED:
            raise FormatError(f"storage {key} is compressed: its bytes cannot be read in place", hint=SAVE_AGAIN)
        if member.size != nbytes:
            raise FormatError(f"storage {key} has {member.size} bytes in the archive, but {nbytes} in its pickle")
        return self._archive.source.start + self._archive.locate(name)

    def check_storage(self, key: str) -> None:
        """Raise FormatError where the checksum of a storage, which must be there, does not hold."""
        name = self.folder + b"data/" + key.encode()
        member, payload = self._archive.members[name], self._archive.locate(name)
        found = 0
        for done in range(0, member.size, READ_AT_ONCE):
            data = self._archive.source.read(payload + done, min(READ_AT_ONCE, member.size - done))
            found = zlib.crc32(data, found)
        if member.checksum not in (0, found):
            raise FormatError(f"the checksum of storage {key} does not hold", hint=AGAIN)

    def _refuse_other_uses(self) -> None:
        names = self._archive.members
        if self.folder + b"constants.pkl" in names or any(name.startswith(self.folder + b"code/") for name in names):
            raise FormatError(
                "a TorchScript archive (torch.jit.save), which is a program and no state dict",
                hint="in PyTorch: torch.save(torch.jit.load(FILE).state_dict(), OUT)",
            )
        order = self.folder + b"byteorder"
        if order in names and self._archive.read(order, 16) != b"little":
            raise refuse_byte_order()


def _find_folder(archive: Archive) -> bytes:
    """The folder that holds `data.pkl`, with its slash."""
    folders = [name[: -len(b"data.pkl")] for name in archive.members if name.endswith(b"/data.pkl")]
    if not folders:
        raise FormatError("a zip archive, but not one that torch.save wrote: it has no data.pkl")
    if len(folders) > 1:
        raise FormatError(f"the archive has {len(folders)} members named data.pkl")
    return folders[0]
