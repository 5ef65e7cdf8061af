"""Why a file is refused as a whole: what it turns out to be, if it is no torch file, so that the error can say it."""

from __future__ import annotations

import struct

from unshard.errors import FormatError
from unshard.formats.torch_file.slices import FileSlice

HEAD_SIZE = 512
AGAIN = "the save or the copy was interrupted; copy the file again, or take an earlier checkpoint"
CHANGED = "the file was changed after torch.save wrote it; copy it again, or take an earlier checkpoint"

SIGNATURES: tuple[tuple[bytes, str, str | None], ...] = (
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself", "git lfs pull"),
    (b"PK\x05\x06", "an empty zip archive", AGAIN),
    (b"GGUF", "a GGUF file (llama.cpp), not a training checkpoint", None),
    (b"\x89HDF", "an HDF5 file", None),
    (b"\x93NUMPY", "a numpy array", None),
    (b"\x1f\x8b", "compressed with gzip", "gunzip it first"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "unzstd it first"),
    (b"\xfd7zXZ", "compressed with xz", "unxz it first"),
    (b"<", "a web page or XML", "the download may have returned an error page; download the file again"),
    (b"{", "JSON", None),
)


def refuse(source: FileSlice, head: bytes) -> FormatError:
    """The error for a file that begins with none of torch's signatures."""
    if not source.size:
        return FormatError("the file is empty", hint=AGAIN)
    for signature, kind, hint in SIGNATURES:
        if head.startswith(signature):
            return FormatError(f"no torch file: this is {kind}", hint=hint)
    if not any(head):
        return FormatError("no torch file: it begins with zeros only", hint=AGAIN)
    if head[257:262] == b"ustar":
        return FormatError("no torch file that we read: a tar archive, as torch wrote before 0.2 (or a packed folder)")
    if len(head) > 8 and head[8:9] == b"{" and struct.unpack_from("<Q", head)[0] <= source.size - 8:
        return FormatError("no torch file: this is a safetensors file", hint="give it the ending .safetensors")
    if head[:1] == b"\x80" and head[1:2] <= b"\x05":
        return FormatError("no torch file: this is a pickle, but not one that torch.save wrote")
    return FormatError(f"no torch file: it begins with {head[:8].hex(' ')}")


def refuse_byte_order() -> FormatError:
    """The error for a file of the other byte order."""
    return FormatError(
        "the file was written on a big-endian machine, and its bytes are not swapped here",
        hint="load it with torch.load and save it again on a little-endian machine",
    )
