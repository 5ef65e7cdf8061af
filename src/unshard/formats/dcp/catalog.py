"""Reads the model in a DCP directory into a catalog, and says what else lies there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unshard.checkpoint import Checkpoint, Note
from unshard.errors import IncompleteError, UnshardError
from unshard.formats.contract import Source
from unshard.formats.dcp.container import Container, open_container
from unshard.formats.dcp.directory import Folder
from unshard.formats.dcp.file_names import is_dcp_file, rank_of
from unshard.formats.dcp.metadata import Steps
from unshard.formats.dcp.roots import Choice, choose_model
from unshard.formats.dcp.titan_names import is_torchtitan
from unshard.formats.surroundings import Surroundings, add_tokenizer, look_around
from unshard.words import bytes_in_words, count_in_words, names_in_words

_MAX_TAIL = 3
"""Levels at which a further root may be given above the directory that corresponds to the main one."""

_PARENTS = 2
"""How far above a checkpoint its config may lie: in accelerate's checkpoint, in the output directory of its run."""

_TO_ASSETS = 4
"""The same for a directory of side files beside one of the parents: VeOmni's `checkpoints/global_step_N/model/ckpt`."""
_ASSETS_WITHIN = ".hf_metadata"
_ASSETS_BESIDE = "model_assets"
_TOKENIZER = "tokenizer"
"""What NeMo Automodel puts into the directory, VeOmni beside its checkpoints, and NeMo-RL beside the weights."""


def read_model(source: Source, format_name: str) -> Checkpoint:
    """The catalog of the model at `source.path`. See `format.Dcp.read`."""
    folders, problems = find_folders(source, holds_files)
    opened = open_container(folders)
    choice = choose_model(opened.outline, source.path, source.model_key)
    container = opened.read(choice.model.names.__contains__)
    tensors = {choice.model.names[key]: tensor for key, tensor in container.tensors.items()}
    tensors = {name: tensor.rename(name) for name, tensor in tensors.items()}
    around = look_around_model(source.path)
    reading = _Reading(choice, container, folders)
    return Checkpoint(
        format=format_name,
        title=f"torch DCP, {count_in_words(len(container.files), 'file')}",
        roots={**source.roots, **(around.roots or {})},
        tensors=tensors,
        config=around.config,
        assets=around.assets,
        adapter=around.adapter,
        dialect="torchtitan" if is_torchtitan(tensors) else "huggingface",
        skipped=reading.skipped(),
        notes=(*reading.notes(), *container.notes),
        problems=(*problems, *container.problems, *around.problems),
    )


def find_folders(
    source: Source, holds: Callable[[Path], bool], what: str = "file of a torch DCP directory"
) -> tuple[list[Folder], list[UnshardError]]:
    """The directory and its counterparts in the further roots, and a problem for each root that has none.

    A further root may be given at any level that the main path has below it: where that one is
    `run/checkpoint-5/pytorch_model_fsdp_0`, `/node1/run` finds the directory of the same name. `holds` recognises it by
    `what` lies there.
    """
    (name, directory), *others = source.roots.items()
    folders = [Folder(directory, name)]
    problems: list[UnshardError] = []
    parts = directory.absolute().parts
    for root, place in others:
        tails = [Path(*parts[len(parts) - count :]) for count in range(min(_MAX_TAIL, len(parts)) + 1)]
        found = next((tail for tail in tails if holds(place / tail)), None)
        if found is None:
            text, hint = f"{place}: no {what} lies here", "leave this --also out, or mend it"
            problems.append(IncompleteError(text, hint=hint))
        else:
            relative = found.as_posix()
            folders.append(Folder(place / found, root, "" if relative == "." else relative))
    return folders, problems


def holds_files(directory: Path) -> bool:
    return directory.is_dir() and any(is_dcp_file(path.name) for path in directory.iterdir())


def look_around_model(directory: Path) -> Surroundings:
    """The side files of the model in a DCP directory."""
    parents = list(directory.absolute().parents)
    beside = [place / _ASSETS_BESIDE for place in parents[:_TO_ASSETS]]
    around = look_around([directory, directory / _ASSETS_WITHIN, *beside], _PARENTS)
    return add_tokenizer(around, [place / _TOKENIZER for place in parents[:_PARENTS]])


@dataclass(frozen=True, slots=True)
class _Reading:
    """What was read, for the report."""

    choice: Choice
    container: Container
    folders: Sequence[Folder]

    def notes(self) -> Iterator[Note]:
        yield Note(self._place())
        for what, keys in (("optimizer states", self.choice.optimizer), ("other states", self.choice.other)):
            if keys:
                named = f" ({names_in_words(keys)})" if what == "other states" else ""
                yield Note(f"{what}: {self._amount(keys)}{named}, left out")
        if models := self.choice.models:
            titles = [group.title for group in models]
            amount = self._amount([key for group in models for key in group.names])
            text = f"{count_in_words(len(models), 'other model')}: {amount} under {names_in_words(titles)}"
            yield Note(f"{text}, left out; --model-key takes {'it' if len(models) == 1 else 'one'}", level="warning")
        if stale := self._unnamed_files():
            text = f"files that the metadata do not name, left by another save: {names_in_words(stale)}"
            yield Note(text, level="warning")

    def skipped(self) -> Mapping[str, str]:
        """The entries that are no tensors, by the dict that they lie in; those of modules by their last names."""
        counts: Counter[str] = Counter()
        for key in self.container.items:
            steps = self.container.paths.get(key) or (key,)
            counts[_within(steps, self.choice.model.path) or str(steps[0])] += 1
        return {name: f"{count_in_words(count, 'entry', 'entries')}, no tensors" for name, count in counts.items()}

    def _place(self) -> str:
        title = self.choice.model.title
        if self.choice.recorded:
            top = "at the top of the training state"
            return f"the model lies {top if title == '.' else f'under `{title}` in the training state'}"
        taken = "no prefix was taken off" if title == "." else f"the prefix `{title}.` was taken off"
        return f"how the training state was nested is not recorded: the model's names were told by themselves, {taken}"

    def _amount(self, keys: Collection[str]) -> str:
        size = sum([self.container.skipped.get(key, 0) for key in keys])
        return f"{count_in_words(len(keys), 'tensor')}, {bytes_in_words(size)}"

    def _unnamed_files(self) -> list[str]:
        """Data files that nothing is recorded of; ranks that had nothing to save may leave empty ones."""
        paths = [path for folder in self.folders for path in folder.path.iterdir() if rank_of(path.name) is not None]
        unnamed = {path.name for path in paths if path.is_file() and path.stat().st_size} - set(self.container.files)
        return sorted(unnamed)


def _within(steps: Steps, model: Steps) -> str | None:
    """What an entry of the model's own dict is called: `*._extra_state`, for there is one in every module."""
    if steps[:-1] != model:
        return None
    parent, _, last = str(steps[-1]).rpartition(".")
    return f"*.{last}" if parent else last
