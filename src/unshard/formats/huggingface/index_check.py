"""What an index says, against what the files hold."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from unshard.formats.huggingface.contents import some
from unshard.formats.huggingface.index import Index
from unshard.formats.huggingface.weights import find_siblings


@dataclass(frozen=True, slots=True)
class Discrepancies:
    """Where an index and the files contradict each other.

    missing:   files that it names and that are not there; `listed` is how many it names.
    unnamed:   files that are numbered as those are that it names.
    lost:      tensors that it puts into one of these, and that no other file has.
    absent:    tensors that it puts into files that are there, and that no file has.
    elsewhere: tensors that lie in another file than it says.
    unlisted:  tensors that are in the files, and not in it.
    """

    missing: tuple[str, ...]
    listed: int
    unnamed: tuple[str, ...]
    lost: tuple[str, ...]
    absent: tuple[str, ...]
    elsewhere: tuple[str, ...]
    unlisted: tuple[str, ...]

    @property
    def is_lacking(self) -> bool:
        """Whether something is nowhere, or in files that the index does not name."""
        return bool(self.missing or self.unnamed or self.lost or self.absent)

    def sentences(self, name: str) -> Iterator[str]:
        """Each kind of them in words. `name` is the index's."""
        if self.missing:
            yield f"{name} names {len(self.missing)} of {self.listed} files that are not there: {some(self.missing)}"
        if self.unnamed:
            yield f"{name} does not name {len(self.unnamed)} files that are numbered as its own: {some(self.unnamed)}"
        for tensors, words in (
            (self.absent, "names {} tensors that are in none of its files"),
            (self.elsewhere, "names the wrong file for {} tensors"),
            (self.unlisted, "does not list {} tensors that are in its files"),
        ):
            if tensors:
                yield f"{name} {words.format(len(tensors))}: {some(tensors)}"


def compare(
    index: Index, homes: Mapping[str, str], there: Collection[str], unreadable: Collection[str]
) -> Discrepancies:
    """The discrepancies between an index and what was read.

    homes:      tensor → the file that it was found in.
    there:      the files that exist.
    unreadable: those of them of which nothing can be said.
    """
    weight_map = index.weight_map
    nowhere = [tensor for tensor, file in weight_map.items() if tensor not in homes and file not in unreadable]
    return Discrepancies(
        missing=tuple([file for file in index.files if file not in there]),
        listed=len(index.files),
        unnamed=tuple(find_siblings(there, [file for file in index.files if file in there])),
        lost=tuple([tensor for tensor in nowhere if weight_map[tensor] not in there]),
        absent=tuple([tensor for tensor in nowhere if weight_map[tensor] in there]),
        elsewhere=tuple([tensor for tensor, file in weight_map.items() if homes.get(tensor, file) != file]),
        unlisted=tuple([tensor for tensor in homes if tensor not in weight_map]),
    )
