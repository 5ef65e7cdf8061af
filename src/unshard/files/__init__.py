"""Source files, read as they are or as what they decode to."""

from unshard.files.descriptors import MOST_OPEN, OpenFiles
from unshard.files.room import Scratch, encoded_files, room_for
from unshard.files.zstd import MEMORY as DECODING

__all__ = ["DECODING", "MOST_OPEN", "OpenFiles", "Scratch", "encoded_files", "room_for"]
