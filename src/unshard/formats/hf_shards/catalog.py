"""Reads a directory of shards into a catalog."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from unshard.checkpoint import Checkpoint, Note, Shape
from unshard.errors import IncompleteError, UnshardError, raise_all
from unshard.formats.contract import Source
from unshard.formats.dcp.catalog import find_folders, look_around_model
from unshard.formats.dcp.metadata import Outline
from unshard.formats.dcp.roots import Choice, choose_model
from unshard.formats.dcp.titan_names import is_torchtitan
from unshard.formats.hf_shards.assembling import Assembler
from unshard.formats.hf_shards.file_names import holds_shards
from unshard.formats.hf_shards.numbering import check_counts, list_missing
from unshard.formats.hf_shards.pieces import Piece, ShardFile, list_shards, read_pieces
from unshard.tensors import Tensor
from unshard.words import count_in_words, names_in_words

_NOT_PROVEN = (
    "neither a config of a known family nor --shapes-from tells the shapes: that no shard is missing behind the last "
    "one could not be proven"
)
_TELL = "where the shapes prove that nothing is missing, this is no error: --config DIR or --shapes-from DIR"


def read_model(source: Source, format_name: str) -> Checkpoint:
    """The catalog of the model at `source.path`. See `format.HfShards.read`."""
    folders, problems = find_folders(source, holds_shards, "shard of torch's HuggingFaceStorageWriter")
    shards = list_shards(folders)
    problems += check_counts([shard.name for shard in shards])
    pieces = read_pieces(shards, problems)
    if not pieces:
        raise_all(problems)
    around = look_around_model(source.path)
    choice = choose_model(Outline(_sizes(pieces)), source.path, source.model_key)
    shapes = source.named_shapes(around.config, choice.model.names.values())
    reading = _Reading(shards, choice, shapes)
    tensors = reading.assemble(pieces, damaged=bool(problems))
    return Checkpoint(
        format=format_name,
        title=reading.title(),
        roots={**source.roots, **(around.roots or {})},
        tensors=tensors,
        config=around.config,
        assets=around.assets,
        world_size=max(reading.numbers),
        adapter=around.adapter,
        dialect="torchtitan" if is_torchtitan(tensors) else "huggingface",
        notes=tuple(reading.notes),
        problems=(*problems, *reading.problems, *around.problems),
    )


def _sizes(pieces: Mapping[str, Sequence[Piece]]) -> dict[str, int]:
    """Bytes of each tensor, replicas counted."""
    return {
        name: sum([prod(piece.box.sizes) * piece.dtype.itemsize for piece in found]) for name, found in pieces.items()
    }


@dataclass(slots=True)
class _Reading:
    """What was read, and what the report must say of it. `shapes` are the model's, None where nothing tells them."""

    shards: Sequence[ShardFile]
    choice: Choice
    shapes: Mapping[str, Shape] | None
    notes: list[Note] = field(default_factory=list)
    problems: list[UnshardError] = field(default_factory=list)

    @property
    def numbers(self) -> set[int]:
        """Those of the shards that are there."""
        return {shard.name.shard for shard in self.shards}

    def title(self) -> str:
        files = f", {count_in_words(len(self.shards), 'file')}" if len(self.shards) > len(self.numbers) else ""
        return f"torch's safetensors shards, {count_in_words(len(self.numbers), 'rank')}{files}"

    def assemble(self, pieces: Mapping[str, Sequence[Piece]], *, damaged: bool) -> dict[str, Tensor]:
        """The model's tensors. `damaged`: files could not be read, so that holes say nothing new."""
        assembler = Assembler(self.shapes or {}, max(self.numbers))
        names = self.choice.model.names
        found = {name: assembler.assemble(name, pieces[key]) for key, name in names.items()}
        tensors = {name: tensor for name, tensor in found.items() if tensor is not None}
        self.notes += [*self._left_out(), *assembler.notes()]
        if not damaged:
            self.problems += assembler.faults.problems([shard.name for shard in self.shards])
            self._judge(assembler)
        return tensors

    def _judge(self, assembler: Assembler) -> None:
        """Say what is proven of the tensors that have no fault, and whether missing numbers of files matter."""
        absent = self._absent()
        if self.shapes is None:
            self.notes.append(Note(_NOT_PROVEN, level="warning"))
        elif assembler.unproven:
            text = "nothing tells the shapes of these tensors: that their last pieces are there could not be proven"
            self.notes.append(Note(text, tuple(assembler.unproven), level="warning"))
        if absent:
            text = f"no shard holds {count_in_words(len(absent), 'parameter')} that the model has"
            self.notes.append(Note(text, tuple(absent), level="warning"))
        missing = list_missing([shard.name for shard in self.shards])
        if not missing or assembler.faults:
            return
        text = f"missing: {' and '.join(missing)}"
        if self.shapes is not None and not assembler.unproven and not absent:
            text += "; but nothing of the model, for the others hold every parameter to its end"
            self.notes.append(Note(text, level="warning"))
        else:
            self.problems.append(IncompleteError(text, hint=_TELL))

    def _absent(self) -> list[str]:
        """Parameters that the model has and no shard holds, unless an adapter was saved without its base model."""
        names = set(self.choice.model.names.values())
        if any(".lora_" in name for name in names):
            return []
        return [name for name in self.shapes or () if name not in names]

    def _left_out(self) -> Iterator[Note]:
        for what, keys in (("optimizer states", self.choice.optimizer), ("other states", self.choice.other)):
            if keys:
                yield Note(f"{what}: {count_in_words(len(keys), 'tensor')} ({names_in_words(keys)}), left out")
        for group in self.choice.models:
            text = f"another model lies under `{group.title}`: {count_in_words(len(group.names), 'tensor')}, left out"
            yield Note(f"{text}; --model-key {group.title} takes it", level="warning")
