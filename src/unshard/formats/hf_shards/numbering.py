"""What the numbers in the names of shards tell: which are missing, and which are of another save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from unshard.errors import IncompleteError, UnshardError
from unshard.formats.hf_shards.file_names import ShardName
from unshard.words import count_in_words, items_in_words, ranges_in_words

OLDER = "keep the shards of one save only: move those of the others to another place"
_HIGHEST = 1_000_000


def check_counts(shards: Collection[ShardName]) -> list[UnshardError]:
    """A problem if the names are of saves that put a rank into different numbers of files."""
    counts = sorted(Counter([shard.count for shard in shards]).items())
    if len(counts) < 2:
        return []
    found = items_in_words([f"{count_in_words(files, 'file')} of -of-{count:05d}" for count, files in counts])
    text = f"shards of {len(counts)} saves lie here, which put a rank into different numbers of files: {found}"
    return [IncompleteError(text, hint=OLDER)]


def list_missing(shards: Collection[ShardName]) -> list[str]:
    """What nothing is there of, in words: "shards 2, 5-6", "file 2 of every shard"."""
    missing: list[str] = []
    if gaps := _find_gaps([shard.shard for shard in shards]):
        missing.append(f"{'shard' if len(gaps) == 1 else 'shards'} {ranges_in_words(gaps)}")
    count = max([shard.count for shard in shards])
    if gaps := _find_gaps([*[shard.file for shard in shards], count + 1]):
        missing.append(f"{'file' if len(gaps) == 1 else 'files'} {ranges_in_words(gaps)} of every shard")
    return missing


def list_partial(shards: Collection[ShardName]) -> list[str]:
    """The files that a shard lacks and other shards have. It need not have had them: it may hold no piece for them."""
    there = set(shards)
    numbers, files = {shard.shard for shard in there}, {(shard.file, shard.count) for shard in there}
    return [str(name) for name in sorted([ShardName(n, *file) for n in numbers for file in files]) if name not in there]


def _find_gaps(numbers: Sequence[int]) -> list[int]:
    """The numbers from 1 that are missing below the highest that is there; above a million nobody counts."""
    there = set(numbers)
    return [number for number in range(1, min(max(there), _HIGHEST)) if number not in there]
