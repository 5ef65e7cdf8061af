"""`--fill-from DIR`: a base model gives the parameters that a checkpoint was saved without."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from unshard import adapters, families
from unshard.adapters.config import BASE_CHANGING_INITS
from unshard.checkpoint import Checkpoint, Note
from unshard.dtypes import BF16, F16, F32
from unshard.errors import ModelError, UnshardError, UsageError
from unshard.formats.huggingface.assets import is_tokenizer_file
from unshard.model import Adapter, Base
from unshard.model_config import class_name
from unshard.opening import open_reference
from unshard.options import MergeOptions
from unshard.tensors import Tensor
from unshard.words import names_in_words

FILL_ROOT = "fill"
"""The root name of the base model's files."""


def open_base(checkpoint: Checkpoint, options: MergeOptions) -> tuple[Checkpoint, Base | None]:
    """The checkpoint with what it needs of the base model's directory, and the base model; None where none was given.

    A checkpoint without config.json (trainers that save an adapter write none) gets the base model's, with the other
    files beside it. Raises UsageError where the words contradict each other, and for a base model of another kind.
    """
    place = options.fill_from
    if place is None:
        return checkpoint, None
    _refuse_contradictions(options)
    found = open_reference(place, options)
    if found.adapter is not None or any("lora_" in name for name in found.tensors):
        raise UsageError(f"`--fill-from {place}`: a PEFT adapter lies there, not a base model")
    if checkpoint.config is None:
        checkpoint = _with_config(checkpoint, found, place)
    _compare_configs(checkpoint.config, found.config, place)
    tensors = families.name_model(found.tensors, found.config or checkpoint.config, MergeOptions()).tensors
    moved = {name: _move(value) for name, value in tensors.items() if isinstance(value, Tensor)}
    notes = [replace(note, text=f"`{place}`: {note.text}") for note in found.notes]
    checkpoint = replace(checkpoint, notes=(*checkpoint.notes, *notes))
    return replace(checkpoint, roots={**checkpoint.roots, FILL_ROOT: place}), Base(moved, str(place))


def widen(base: Base) -> Base:
    """The base model as it stands beside fp32 masters: bf16 and fp16 widened, exactly."""
    wide = {name: tensor.cast(F32) if tensor.dtype in (BF16, F16) else tensor for name, tensor in base.tensors.items()}
    return replace(base, tensors=wide)


def fuse(
    split: adapters.Split, base: Base | None, config: Mapping[str, Any] | None, *, in_file: bool
) -> tuple[adapters.Fused, Base | None]:
    """The adapter fused into the checkpoint's own tensors, and into those of the base model that it lacks.

    in_file: the split's names are those of the file, not those of a running model.

    Of the base model only what the adapter changed is in the result; the base model that comes with it knows which.
    """
    if base is None:
        return adapters.fuse_all(split), None
    named = base.tensors if in_file else families.name_as_running(base.tensors, config, packed=True)
    lent = {name: tensor.rename(name) for name, tensor in named.items() if name not in split.base}
    fused = adapters.fuse_all(replace(split, base={**lent, **split.base}))
    tensors = {name: value for name, value in fused.tensors.items() if value is not lent.get(name)}
    used = frozenset(tensors.keys() & lent.keys())
    problems = [*fused.problems, *_changed_at_the_start(split.adapters, used, base)]
    return fused._replace(tensors=tensors, problems=tuple(problems)), replace(base, lent=used)


def _changed_at_the_start(written: Iterable[Adapter], used: Collection[str], base: Base) -> Iterator[UnshardError]:
    """A problem for an adapter whose initialisation changed the base weights that `base` has as they were before."""
    for adapter in written:
        init = str(adapter.config.get("init_lora_weights"))
        if used and init.lower().startswith(BASE_CHANGING_INITS):
            yield ModelError(
                f"{init} changed the base weights when training began, and `{base.place}` has them as they were before:"
                f" the adapter cannot be fused into {names_in_words(sorted(used))}",
                hint="leave `--fuse-lora` out: PEFT repeats the initialisation when it loads the adapter",
            )


def _refuse_contradictions(options: MergeOptions) -> None:
    others = {
        "--weights-only": options.weights_only,
        "--names stored": options.names == "stored",
        "--adapter-only": options.adapter_only,
    }
    for word, given in others.items():
        if given:
            why = "writes no base model" if word == "--adapter-only" else "writes what is stored, as it is stored"
            raise UsageError(f"`{word}` {why}: `--fill-from` has nothing to add", hint=f"leave `{word}` out")


def _with_config(checkpoint: Checkpoint, found: Checkpoint, place: Path) -> Checkpoint:
    """The checkpoint with the base model's config and side files; a tokenizer of its own stays."""
    own = {asset.path for asset in checkpoint.assets}
    has_tokenizer = any(is_tokenizer_file(path) for path in own)
    added = [
        replace(asset, file=replace(asset.file, root=FILL_ROOT))
        for asset in found.assets
        if asset.path not in own and not (has_tokenizer and is_tokenizer_file(asset.path))
    ]
    assets = tuple(sorted([*checkpoint.assets, *added], key=lambda asset: asset.path))
    note = Note(f"there is no config.json: the one in `{place}` was taken, with the files beside it")
    return replace(checkpoint, config=found.config, assets=assets, notes=(*checkpoint.notes, note))


def _compare_configs(config: Mapping[str, Any] | None, other: Mapping[str, Any] | None, place: Path) -> None:
    """Raise UsageError where the base model cannot be the one that training began with."""
    if config is None or other is None:
        return
    kinds = [each.get("model_type") for each in (config, other)]
    if kinds[0] == kinds[1] and not families.is_known(config):
        kinds = [class_name(each) for each in (config, other)]  # the base model must tell which parameters there are
    if kinds[0] != kinds[1]:
        raise UsageError(
            f"`--fill-from {place}` is a model of type {kinds[1]}; the checkpoint is one of type {kinds[0]}",
            hint="give the model that training began with",
        )
    if other.get("quantization_config") and not config.get("quantization_config"):
        raise UsageError(
            f"`--fill-from {place}`: its weights are quantised, and the checkpoint's are not",
            hint="give the model that it was quantised from",
        )


def _move(tensor: Tensor) -> Tensor:
    """The tensor with its files under the root of the base model."""
    chunks = [
        replace(chunk, extent=replace(chunk.extent, file=replace(chunk.extent.file, root=FILL_ROOT)))
        for chunk in tensor.chunks
    ]
    return replace(tensor, chunks=tuple(chunks))
