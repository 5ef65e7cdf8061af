"""One of two models that are compared: a Hugging Face directory as it lies there, or what a merge would make of a
checkpoint, so that both sides speak of the same tensors.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from unshard import families
from unshard.checkpoint import Checkpoint, Note
from unshard.errors import VerificationError, raise_all
from unshard.families.naming.ties import find_tied
from unshard.formats.contract import Source
from unshard.formats.huggingface.reader import HuggingFace
from unshard.formats.huggingface.target import cast_values
from unshard.locate import detect
from unshard.model_files import ADAPTER_CONFIG, ADAPTER_DIRECTORY, is_adapter_file
from unshard.opening import open_checkpoint
from unshard.options import MergeOptions
from unshard.plan.compiler import compile_plan
from unshard.preparing import decide
from unshard.run.occupants import MARKER
from unshard.target import Target
from unshard.tensors import Value
from unshard.verify.structure import check_index, check_weights_file, move_under


@dataclass(frozen=True, slots=True)
class Side:
    """A model as it is compared.

    tensors:    name → value. The tensors of an adapter that lies below the model have their directory in front:
                "lora_adapter/base_model.model.…".
    roots:      the roots that their extents refer to.
    ties:       name of a tensor that is not stored → name of the one that the model uses in its place.
    adapters:   directory ("." for the model's own) → parsed adapter_config.json.
    family:     what names and shapes were checked against; None: no family knows the architecture.
    is_checkpoint: it is what a merge would make, and does not lie there as a model.
    """

    tensors: Mapping[str, Value]
    roots: Mapping[str, Path]
    ties: Mapping[str, str] = field(default_factory=dict)
    adapters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    family: str | None = None
    notes: tuple[Note, ...] = ()
    is_checkpoint: bool = False

    @property
    def is_adapter(self) -> bool:
        """Whether it is a PEFT adapter without a base model."""
        return "." in self.adapters

    @property
    def has_adapters(self) -> bool:
        """Whether adapters lie below the model."""
        return any(directory != "." for directory in self.adapters)

    def without_adapters(self) -> Side:
        """The base model alone."""
        tensors = {name: value for name, value in self.tensors.items() if not name.startswith(f"{ADAPTER_DIRECTORY}/")}
        return replace(self, tensors=tensors, adapters={})


def open_place(path: Path, options: MergeOptions) -> Checkpoint:
    """The catalog of a side. What the options say of a checkpoint does not hold for models that lie there whole."""
    found = detect(path) if path.exists() else None
    if found is not None and found.name == HuggingFace.name:
        options = replace(
            options, backend=None, also=(), shapes_from=None, config=None, model_key=None, weights=None, parallel={}
        )
    catalog = open_checkpoint(path, options)
    raise_all(catalog.problems)
    return catalog


def is_model(catalog: Checkpoint, options: MergeOptions) -> bool:
    """Whether the catalog is a merged model (or adapter): no checkpoint, and no adapter that gets a base."""
    return catalog.format == HuggingFace.name and not (options.fill_from and is_adapter(catalog))


def is_adapter(catalog: Checkpoint) -> bool:
    """Whether the catalog is a PEFT adapter directory."""
    files = [chunk.extent.file.path for tensor in catalog.tensors.values() for chunk in tensor.chunks]
    return bool(files) and all(is_adapter_file(file) for file in files)


def make_side(catalog: Checkpoint, options: MergeOptions, *, thorough: bool) -> Side:
    """The side of a catalog. `thorough`: it is what the user wants to have checked, and not only read.

    Raises an UnshardError where a checkpoint does not make a model, and where a model's structure does not hold.
    """
    if is_model(catalog, options):
        return _read_model(catalog, options, thorough=thorough)
    return _plan_model(catalog, options)


def _plan_model(catalog: Checkpoint, options: MergeOptions) -> Side:
    """What a merge with the same options would write; nothing is written, but every element must have a source."""
    decision = decide(catalog, options, str(catalog.roots["source"]))
    compile_plan(decision.target)
    tensors = dict(_planned_tensors(decision.target))
    config = {**(decision.checkpoint.config or {}), **decision.model.config_changes}
    adapters = dict(_planned_adapters(decision.target))
    ties = find_tied(tensors, config)
    roots = decision.target.roots
    return Side(tensors, roots, ties, adapters, decision.model.family, decision.notes, is_checkpoint=True)


def _planned_tensors(target: Target) -> Iterator[tuple[str, Value]]:
    for directory, values in target.weights_by_directory.items():
        for value in values:
            yield _name_in(directory, value.name), value


def _planned_adapters(target: Target) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for file in target.files:
        path = PurePosixPath(file.path)
        if path.name == ADAPTER_CONFIG:
            yield str(path.parent), json.loads(b"".join([data for _, data in file.literals]))


def _read_model(catalog: Checkpoint, options: MergeOptions, *, thorough: bool) -> Side:
    """A Hugging Face directory, under its own names; names and shapes are checked against its own config.

    Not against it are checked the names of a model that was merged with stored ones, as the options say. What it was
    merged from is in the type that `--dtype` gave it.
    """
    if thorough:
        _check_structure(catalog)
    family = None
    uncast: Collection[str] = ()
    if catalog.config is not None and not is_adapter(catalog):
        naming = MergeOptions(names="stored" if options.names == "stored" else "hub", weights_only=options.weights_only)
        place = str(catalog.roots["source"])
        model = families.name_model(catalog.tensors, catalog.config, naming, source=place)
        raise_all(model.problems)
        family, uncast = model.family, model.uncast
    tensors: dict[str, Value] = dict(catalog.tensors)
    adapters: dict[str, Mapping[str, Any]] = {}
    if is_adapter(catalog):
        adapters["."] = catalog.adapter or {}
    for directory, adapter in _adapters_below(catalog):
        if thorough:
            _check_structure(adapter)
        adapters[directory] = adapter.adapter or {}
        for name, tensor in adapter.tensors.items():
            tensors[_name_in(directory, name)] = move_under(tensor, "source", directory)
    notes = list(catalog.notes)
    if not thorough and options.dtype != "keep":
        tensors = cast_values(tensors, options.dtype, uncast)
        notes.append(Note(f"compared with `{catalog.roots['source']}` as `--dtype {options.dtype}` rounds it"))
    ties = find_tied(tensors, catalog.config or {})
    return Side(tensors, catalog.roots, ties, adapters, family, tuple(notes))


def _adapters_below(catalog: Checkpoint) -> Iterator[tuple[str, Checkpoint]]:
    """The adapters that `merge` writes beside a model: `lora_adapter` and what lies in it."""
    root = catalog.roots["source"]
    top = root / ADAPTER_DIRECTORY
    if not top.is_dir():
        return
    for place in (top, *sorted(child for child in top.iterdir() if child.is_dir())):
        if HuggingFace().detect(place) is not None:
            found = HuggingFace().read(Source(place))
            raise_all(found.problems)
            yield place.relative_to(root).as_posix(), found


def _check_structure(catalog: Checkpoint) -> None:
    """Everything about the files of a model that their catalog does not tell."""
    root = catalog.roots["source"]
    if (root / MARKER).exists():
        message = f"{root}: is not whole: a merge into it is under way, or was killed"
        raise VerificationError(message, hint="run that merge again; it clears away what was left behind")
    files = {chunk.extent.file.path for tensor in catalog.tensors.values() for chunk in tensor.chunks}
    raise_all([problem for file in sorted(files) for problem in check_weights_file(root / file)])
    raise_all(check_index(root, sum(tensor.size_in_bytes for tensor in catalog.tensors.values())))


def _name_in(directory: str, name: str) -> str:
    return name if directory == "." else f"{directory}/{name}"
