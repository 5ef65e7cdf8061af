"""The layout of a Hugging Face model directory, down to the last byte offset."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unshard.checkpoint import Asset, Checkpoint, Note
from unshard.dtypes import CAST_CHOICES, U8, DType
from unshard.errors import ModelError, OutputError, UsageError
from unshard.formats.huggingface import shards
from unshard.formats.huggingface.assets import find_stray_link, is_tokenizer_file, read_small_file
from unshard.formats.huggingface.bin_file import lay_out_archive
from unshard.formats.huggingface.config_file import PLAIN_FLOATS, adapt_config
from unshard.formats.huggingface.index import Index
from unshard.formats.safetensors_file import lay_out_header
from unshard.model import Adapter, Model
from unshard.model_files import ADAPTER_CONFIG, ADAPTER_DIRECTORY, ADAPTER_WEIGHTS, CONFIG
from unshard.options import MergeOptions
from unshard.target import Target, TargetFile
from unshard.tensors import Tensor, Value, contiguous_chunk
from unshard.words import count_in_words, items_in_words, names_in_words

_ADAPTER_NAME = re.compile(r"[\w\- +.]*[\w\-]")


def lay_out(model: Model, source: Checkpoint, options: MergeOptions, adapters: Sequence[Adapter]) -> Target:
    """All files of the output: weights (one file, or several and an index), side files, adapters.

    `source` gives the assets, the parsed config and the roots of both; `--weights-only` takes none of the former. An
    output without base weights is a PEFT adapter directory itself; of the assets it gets the tokenizer's. Raises
    ModelError where names cannot be written, and where there is nothing to write.
    """
    if not model.tensors and not adapters:
        raise ModelError("there are no tensors to write")
    files = _Files()
    if model.tensors:
        values = cast_values(model.tensors, options.dtype, model.uncast)
        files.notes += _note_uncast(values, model.uncast, options)
        _add_weights(values, model.layout, options, files)
        if not options.weights_only:
            _add_assets(source.assets, source, list(values.values()), model, files)
    else:
        _add_assets([asset for asset in source.assets if is_tokenizer_file(asset.path)], source, [], model, files)
    for adapter in adapters:
        _add_adapter(adapter, options, files, nested=bool(model.tensors))
    return Target(files.in_order(), source.roots, model.claims, (*model.notes, *files.notes))


@dataclass(slots=True)
class _Files:
    """The files so far, by path, and what must be said about them. `last` is the one that makes the output whole."""

    by_path: dict[str, TargetFile] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    last: str | None = None

    def add(self, file: TargetFile) -> None:
        if file.path in self.by_path:
            raise OutputError(f"two files of the output would be called {file.path!r}")
        self.by_path[file.path] = file
        if file.last:
            self.last = file.path

    def in_order(self) -> tuple[TargetFile, ...]:
        """All files, with the one that makes the output whole at the end."""
        return tuple(sorted(self.by_path.values(), key=lambda file: file.last))


def cast_values(values: Mapping[str, Value], dtype: str, uncast: Collection[str] = ()) -> dict[str, Value]:
    """The values under their output names, in the type that `--dtype` asks for ("keep": their own).

    Integers stay what they are, and so do the small floats of quantised weights, which mean nothing without their
    scales. `uncast` are names that stay what they are. Raises UsageError where values would be rounded twice.
    """
    named = {name: value if value.name == name else value.rename(name) for name, value in values.items()}
    wanted = CAST_CHOICES.get(dtype)
    if wanted is None:
        return named
    rounded = [name for name, value in named.items() if _is_rounded(value, wanted) and name not in uncast]
    if rounded:
        raise UsageError(
            f"`--dtype {dtype}`: these are rounded to another type already, and would be rounded twice: "
            f"{names_in_words(rounded)}",
            hint="leave `--dtype` out; or, where training kept fp32 masters alone, leave `--weights model` out",
        )
    return {
        name: value.cast(wanted) if value.dtype in PLAIN_FLOATS and name not in uncast else value
        for name, value in named.items()
    }


def _is_rounded(value: Value, wanted: DType) -> bool:
    return isinstance(value, Tensor) and value.is_rounded and value.dtype != wanted


def _note_uncast(values: Mapping[str, Value], uncast: Collection[str], options: MergeOptions) -> list[Note]:
    if options.dtype == "keep":
        return []
    kept = [name for name, value in values.items() if value.dtype.is_float and value.dtype not in PLAIN_FLOATS]
    needed = [name for name in values if name in uncast]
    notes = [Note(f"{len(kept)} tensors hold quantised floats and were not cast", tuple(kept), "warning")]
    text = f"{count_in_words(len(needed), 'tensor')} not cast: the model needs their precision"
    return (notes if kept else []) + ([Note(text, tuple(needed))] if needed else [])


# -- weights -----------------------------------------------------------------------------------------------------------


def _add_weights(
    values: Mapping[str, Value], layout: Mapping[str, str] | None, options: MergeOptions, files: _Files
) -> None:
    naming = shards.BIN if options.container == "bin" else shards.SAFETENSORS
    if layout is None:
        sizes = {name: value.size_in_bytes for name, value in values.items()}
        groups = shards.assign_files(sizes, options.max_shard_size, naming)
    else:
        groups = shards.follow_layout(values, layout, naming)
    for path, names in groups.items():
        members = {name: values[name] for name in names}
        files.add(_weights_file(path, members, naming, last=len(groups) == 1))
    if len(groups) > 1:
        totals = {
            "total_parameters": sum(value.size * value.dtype.packed for value in values.values()),
            "total_size": sum(value.size_in_bytes for value in values.values()),
        }
        index = Index({name: path for path, names in groups.items() for name in names}, totals)
        files.add(_literal_file(naming.index, index.render(), last=True))


def _weights_file(path: str, values: Mapping[str, Value], naming: shards.Naming, *, last: bool) -> TargetFile:
    entries = [(name, value.dtype, value.shape) for name, value in values.items()]
    if naming is shards.BIN:
        archive = lay_out_archive(path.removesuffix(naming.suffix), entries)
        tensors = _place(values, archive.offsets)
        return TargetFile(path, archive.size, archive.literals, tensors, archive.seals, last)
    header = lay_out_header(entries)
    return TargetFile(path, header.size, ((0, header.data),), _place(values, header.offsets), last=last)


def _place(values: Mapping[str, Value], offsets: Mapping[str, int]) -> tuple[tuple[int, Value], ...]:
    return tuple([(offset, values[name]) for name, offset in offsets.items()])


# -- side files --------------------------------------------------------------------------------------------------------


def _add_assets(
    assets: Iterable[Asset], source: Checkpoint, values: Sequence[Value], model: Model, files: _Files
) -> None:
    strays: list[str] = []
    for asset in assets:
        place = source.roots[asset.file.root] / asset.file.path
        stray = find_stray_link(source.roots[asset.file.root], asset.file.path)
        if stray is not None:
            strays.append(f"{asset.path} is {stray}")
        if asset.path == CONFIG and source.config is not None:
            data = read_small_file(place)
            adapted, notes = adapt_config(data, source.config, values, model.config_changes, place)
            files.notes += notes
            if adapted != data:
                files.add(_literal_file(asset.path, adapted))
                continue
        chunks = (contiguous_chunk(asset.file, 0, (asset.size,), U8),) if asset.size else ()
        content = Tensor(asset.path, U8, (asset.size,), chunks)
        files.add(TargetFile(asset.path, asset.size, tensors=((0, content),) if asset.size else ()))
    if source.config is not None and values and CONFIG not in files.by_path:
        files.add(_literal_file(CONFIG, _write_config(source.config, values, model)))
    if strays:
        text = f"links lead out of the checkpoint, and what lies there is copied: {items_in_words(strays, 5)}"
        files.notes.append(Note(text, level="warning"))


def _write_config(config: Mapping[str, Any], values: Sequence[Value], model: Model) -> bytes:
    """A config.json of its own, for a checkpoint that has a config and no file of it."""
    data = (json.dumps(dict(config), indent=2, sort_keys=True) + "\n").encode("ascii")
    return adapt_config(data, config, values, model.config_changes, Path(CONFIG))[0]


def _literal_file(path: str, data: bytes, *, last: bool = False) -> TargetFile:
    return TargetFile(path, len(data), ((0, data),), last=last)


# -- adapters ----------------------------------------------------------------------------------------------------------


def _add_adapter(adapter: Adapter, options: MergeOptions, files: _Files, *, nested: bool) -> None:
    """The two files of a PEFT directory (`PeftModel.save_pretrained`): `default` at its root, others below it."""
    directory = f"{ADAPTER_DIRECTORY}/" if nested else ""
    if adapter.name != "default":
        if not _ADAPTER_NAME.fullmatch(adapter.name):
            raise ModelError(f"the adapter's name {adapter.name!r} cannot be a directory's")
        directory += f"{adapter.name}/"
    values = cast_values(adapter.tensors, options.dtype)
    weights = _weights_file(directory + ADAPTER_WEIGHTS, values, shards.SAFETENSORS, last=files.last is None)
    files.add(weights)
    config = json.dumps(dict(adapter.config), indent=2, sort_keys=True) + "\n"
    files.add(_literal_file(directory + ADAPTER_CONFIG, config.encode("ascii")))
