"""One rank's file: the state dicts of its virtual pipeline stages, and what it records beside them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unshard.errors import FormatError, UnshardError
from unshard.formats.megatron.facts import read_facts
from unshard.formats.megatron.names import Skipped, strip_wrappers
from unshard.formats.megatron.ranks.directories import RankDirectory
from unshard.formats.nested import flatten
from unshard.formats.state_dict import read_whole, what_it_is
from unshard.formats.torch_file import Opaque, StoredTensor, UnsupportedTensor, WrapperSubclass, read_torch_file
from unshard.tensors import Tensor
from unshard.words import items_in_lines

_STAGE = re.compile(r"model(\d{1,4})")
_READ = {"model", "args", "checkpoint_version", "iteration"}
_MAX_STAGES = 10_000
_LISTED = 20
_DEQUANTISE = "load the checkpoint in Megatron-LM and save it without --fp8-param-gather"


@dataclass(frozen=True, slots=True)
class RankContent:
    """What one rank holds.

    number:    a running number over the ranks of the checkpoint, for chunks.
    facts:     its `args`, normalised; {} where it has none.
    iteration: None where it says none.
    version:   `checkpoint_version`; 0 where it says none, as Megatron-LM reads it.
    models:    name → this rank's shard, one mapping per virtual pipeline stage.
    """

    directory: RankDirectory
    number: int
    facts: Mapping[str, Any]
    iteration: int | None
    version: float
    models: tuple[Mapping[str, Tensor], ...]

    @property
    def names(self) -> set[str]:
        return {name for model in self.models for name in model}


def read_rank(directory: RankDirectory, number: int, skipped: Skipped, problems: list[UnshardError]) -> RankContent:
    """The content of a rank's file; tensors that cannot be read are added to `problems`.

    Raises FormatError where the file is damaged or holds no model.
    """
    root = read_torch_file(directory.path, directory.file).root
    states = _find_models(root, str(directory.path))
    beside = root if isinstance(root, Mapping) and not any(state is root for state in states) else {}
    for name in beside:
        known = not isinstance(name, str) or name in _READ or _STAGE.fullmatch(name)
        if not known and not skipped.take(name):
            skipped.add(name, "lies beside the model")
    unreadable: list[str] = []
    models = tuple([dict(_tensors(state, directory, number, skipped, unreadable)) for state in states])
    if unreadable:
        listed = items_in_lines(unreadable, _LISTED)
        hint = _DEQUANTISE if any("transformer_engine" in line for line in unreadable) else None
        problems.append(FormatError(f"{directory.path}: entries that cannot be read:\n{listed}", hint=hint))
    version, iteration = beside.get("checkpoint_version"), beside.get("iteration")
    return RankContent(
        directory,
        number,
        read_facts(beside.get("args")),
        iteration if type(iteration) is int else None,
        float(version) if isinstance(version, (int, float)) else 0.0,
        models,
    )


def _find_models(root: Any, place: str) -> Sequence[Mapping[Any, Any]]:
    """The state dicts in a file, one per virtual stage. Raises FormatError where there is none.

    Megatron-LM keeps them under `model`, or `model0`, `model1`, … of virtual stages; verl's `model.pt` is a list.
    """
    if isinstance(root, Mapping):
        numbered = {int(match[1]): root[name] for name in root if (match := _STAGE.fullmatch(str(name)))}
        if "model" in root:
            models = root["model"] if isinstance(root["model"], (list, tuple)) else [root["model"]]
        elif numbered:
            if sorted(numbered) != list(range(len(numbered))):
                raise FormatError(f"{place}: holds the virtual stages {sorted(numbered)}, some are missing")
            models = [numbered[number] for number in sorted(numbered)]
        else:
            models = [root] if any(isinstance(value, StoredTensor) for value in root.values()) else []
    else:
        models = root if isinstance(root, (list, tuple)) else []
    if len(models) > _MAX_STAGES:
        raise FormatError(f"{place}: holds {len(models):,} virtual stages, more than any model has layers")
    if not models or not all(isinstance(model, Mapping) for model in models):
        raise FormatError(f"{place}: holds no `model`: neither the state dict of a model nor those of virtual stages")
    return models


def _tensors(
    state: Mapping[Any, Any], directory: RankDirectory, number: int, skipped: Skipped, unreadable: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a state dict; what is no weight is counted, what cannot be read is described."""
    for stored, value in flatten(state, str(directory.path)):
        name = strip_wrappers(stored)
        if skipped.take(name):
            continue
        if isinstance(value, StoredTensor):
            try:
                yield name, Tensor(name, value.dtype, value.shape, read_whole(value, number))
            except FormatError as error:
                unreadable.append(f"{name}: {error.message}")
        elif isinstance(value, UnsupportedTensor):
            unreadable.append(f"{name}: this tensor {value.reason}")
        elif isinstance(value, WrapperSubclass) or (isinstance(value, Opaque) and _is_quantised(value)):
            unreadable.append(f"{name}: a {value.cls.path}, whose stored bytes are not its values")
        else:
            skipped.add(name, f"no tensor, but {what_it_is(value)}")


def _is_quantised(value: Opaque) -> bool:
    """Whether an object is a tensor of TransformerEngine (`Float8Tensor`, `MXFP8Tensor`): bytes and scales."""
    return value.cls.module.partition(".")[0] == "transformer_engine" and "Tensor" in value.cls.name
