"""A Hugging Face model directory, a PEFT adapter directory, or a lone safetensors file, as a catalog."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from unshard.checkpoint import Asset, Checkpoint, Note
from unshard.errors import NotACheckpointError, UnshardError, command_line
from unshard.formats.contract import Source
from unshard.formats.hf_shards.file_names import find_shards_near
from unshard.formats.huggingface.assets import SideFilesError, find_assets, list_directory, read_config
from unshard.formats.huggingface.placeholders import tell_masters, tell_placeholders
from unshard.formats.huggingface.weights import WeightsFiles, find_weights
from unshard.model_files import ADAPTER_CONFIG
from unshard.tensors import SourceFile

_SUFFIX = ".safetensors"


class HuggingFace:
    """The format of `save_pretrained`. See `formats.contract.Format`."""

    name = "huggingface"
    backends: Sequence[str] = ("huggingface",)

    def detect(self, path: Path) -> str | None:
        if path.is_file():
            return "a safetensors file" if path.name.endswith(_SUFFIX) else None
        weights = find_weights(_list_files([path])) if path.is_dir() else None
        return str(weights) if weights else None

    def read(self, source: Source) -> Checkpoint:
        return self._read(source, as_source=True)

    def read_output(self, source: Source) -> Checkpoint:
        """What the files hold, to be verified: without what tensors of shape [0] or neighbours mean in a source."""
        return self._read(source, as_source=False)

    def _read(self, source: Source, *, as_source: bool) -> Checkpoint:
        from unshard.formats.huggingface.catalog import Catalog  # late: to detect takes little

        if source.path.is_file():
            weights: WeightsFiles | None = WeightsFiles("safetensors", (source.path.name,), usual=False)
            places = {source.path.name: SourceFile("source", source.path.name)}
            title = "a safetensors file"
        else:
            files = _list_files(source.roots.values())
            roots = list(source.roots)
            places = {name: SourceFile(roots[place], name) for name, place in files.items()}
            weights = find_weights(files)
            title = str(weights)
        if weights is None:
            message = f"{source.path}: no weights of a Hugging Face model"
            raise NotACheckpointError(message, hint=command_line("ls", source.path))
        catalog = Catalog(source, places)
        config, assets = catalog.attempt(lambda: _find_side_files(source.path)) or (None, ())
        catalog.read(weights, config)
        if as_source and not catalog.problems:
            catalog.problems += tell_placeholders(catalog.tensors, source.path, is_adapter=weights.is_adapter)
        notes: Sequence[Note] = catalog.notes
        problems: Sequence[UnshardError] = catalog.problems
        if as_source:
            notes, problems = _with_shards(source.path, notes, problems)
            notes = [*notes, *tell_masters(source.path)]
        return Checkpoint(
            format=self.name,
            title=title[:1].upper() + title[1:],
            roots=source.roots,
            tensors=catalog.tensors,
            config=config,
            assets=assets,
            adapter=catalog.attempt(lambda: _read_adapter_config(source.path)) if weights.is_adapter else None,
            skipped=catalog.skipped,
            notes=tuple(notes),
            problems=tuple(problems),
        )


def _list_files(directories: Iterable[Path]) -> dict[str, int]:
    """Names of the files in directories → the number of the first directory that has it. Links to nothing count."""
    found: dict[str, int] = {}
    for number, directory in enumerate(directories):
        for entry in list_directory(directory):
            if not entry.is_dir():
                found.setdefault(entry.name, number)
    return found


def _find_side_files(path: Path) -> tuple[dict[str, Any] | None, tuple[Asset, ...]]:
    """The parsed config and the assets; none beside a file that was given by its own name."""
    return find_assets(path, "source") if path.is_dir() else (None, ())


def _read_adapter_config(directory: Path) -> dict[str, Any] | None:
    path = directory / ADAPTER_CONFIG
    return read_config(path) if path.exists() else None


def _with_shards(
    path: Path, notes: Sequence[Note], problems: Sequence[UnshardError]
) -> tuple[Sequence[Note], Sequence[UnshardError]]:
    """What is said of a model that torch put together from shards which are still there: they are the way out.

    But not where config.json is malformed, for theirs is the same.
    """
    shards = find_shards_near(path)
    if shards is None:
        return notes, problems
    said = Note(f"the shards that this model was put together from lie in `{shards}`, and were not read")
    hint = "merge the shards that it was put together from: " + command_line("unshard", "merge", shards, "OUT")
    told = [
        problem if isinstance(problem, SideFilesError) else type(problem)(problem.message, hint=hint)
        for problem in problems
    ]
    return [*notes, said], told
