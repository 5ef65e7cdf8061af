"""The layers of DeepSpeed's PipelineModule: files per layer, and the stages' fp32 masters under the same names.

`layer_{LL}-model_{MM}-model_states.pt` has the parameters of one layer on tensor-parallel rank MM (no `-model_MM` where
the topology has no such axis), whatever stage ran it. The optimizer's files are per stage and tensor-parallel rank,
with `mp_rank` = stage * tensor ranks + tensor rank. There a parameter is called `LL.name`, and one of a layer that
several stages share `tied_modules.KEY.name`; each of these stages has a master of it. Sources: DeepSpeed
`runtime/pipe/module.py`, `runtime/pipe/topology.py` (axes pipe, data, model); runs of 0.19.8.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from unshard.checkpoint import Shape
from unshard.errors import FormatError, IncompleteError, UnshardError
from unshard.formats.deepspeed.absent import missing_in_words
from unshard.formats.megatron.sections import join_replicas
from unshard.tensors import Tensor
from unshard.words import items_in_lines, items_in_words, ranges_in_words

_OF_LAYER = re.compile(r"(\d{1,6})\.(.+)")
_TIED = re.compile(r"tied_modules\.([^.]+)\.(.+)")
_MOST_RANKS = 1 << 12
_ONE_RUN = "files of different checkpoints may be mixed here"


def read_layers(
    states: Mapping[tuple[int, int], Mapping[str, Tensor]],
    stated: Iterable[str],
    problems: list[UnshardError],
    *,
    least: int = 1,
    numbered: bool = True,
) -> list[dict[str, Tensor]]:
    """Per tensor-parallel rank, the parameters of all layers as `LL.name`.

    states: (layer, tensor rank) → the content of its file; at least one.
    stated: names in the `param_shapes` of all model-parallel ranks, each as often as ranks have it, which tell of files
            that are missing; least: how many tensor-parallel ranks there are at least.
    numbered: whether the files' names tell the tensor-parallel rank.

    Raises FormatError for more ranks than can be.
    """
    times = Counter([name for name in stated if _OF_LAYER.fullmatch(name)])
    ranks = max(least, *[rank + 1 for _, rank in states], *times.values())
    if ranks > _MOST_RANKS:
        raise FormatError(f"the files' names count to {ranks:,} tensor-parallel ranks, more than any cluster has")
    numbers = {layer for layer, _ in states}
    numbers |= {int(name.partition(".")[0]) for name in times}
    missing = [(layer, rank) for layer in sorted(numbers) for rank in range(ranks) if (layer, rank) not in states]
    if missing:
        names = [_file_name(layer, rank if numbered else None) for layer, rank in missing]
        problems.append(
            IncompleteError(
                missing_in_words(names, f"{len(numbers) * ranks:,} files of layers"),
                hint="fetch the missing files: one per layer of the pipeline, and per tensor-parallel rank",
            )
        )
    parts: list[dict[str, Tensor]] = [{} for _ in range(ranks)]
    for (layer, rank), state in sorted(states.items()):
        parts[rank] |= {f"{layer}.{name}": tensor.rename(f"{layer}.{name}") for name, tensor in state.items()}
    return parts


def _file_name(layer: int, rank: int | None) -> str:
    part = "" if rank is None else f"-model_{rank:02d}"
    return f"layer_{layer:02d}{part}-model_states.pt"


def outline(part: Mapping[str, Tensor]) -> dict[int, dict[str, Shape]]:
    """What one rank holds, layer by layer: local name → shape."""
    layers: dict[int, dict[str, Shape]] = defaultdict(dict)
    for name, tensor in part.items():
        number, _, local = name.partition(".")
        layers[int(number)][local] = tensor.shape
    return layers


def masters_of_layers(
    masters: Sequence[Mapping[str, Tensor]], parts: Sequence[Mapping[str, Tensor]]
) -> list[dict[str, Tensor]]:
    """Per tensor-parallel rank, the masters of all its stages, by the names that `parts` (of `read_layers`) has.

    masters: of each `mp_rank`, in their order. Raises FormatError where they cannot be told to belong to the layers,
    IncompleteError where a shared module has no file.
    """
    ranks = len(parts)
    if len(masters) % ranks:
        raise FormatError(f"{len(masters)} model-parallel ranks are no stages of {ranks} tensor-parallel ranks each")
    found = []
    for rank, part in enumerate(parts):
        stages = masters[rank::ranks]
        own: dict[str, list[Tensor]] = defaultdict(list)
        places = _tied_places([name for stage in stages for name in stage], part)
        for stage in stages:
            for name, tensor in stage.items():
                for place in places.get(name, (name,)):
                    own[place].append(tensor)
        found.append(dict(_join_stages(own, part)))
    return found


def _tied_places(names: Sequence[str], part: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
    """`tied_modules.KEY.name` → the names of the layers that are this module: those with its parameters and no others.

    A layer that uses the module through a function has no file. Raises FormatError where several modules look alike,
    IncompleteError where no file has one.
    """
    tied: dict[str, set[str]] = defaultdict(set)
    with_masters = set()
    for name in names:
        if match := _TIED.fullmatch(name):
            tied[match[1]].add(match[2])
        elif match := _OF_LAYER.fullmatch(name):
            with_masters.add(int(match[1]))
    shared = {number: set(local) for number, local in outline(part).items() if number not in with_masters}
    places: dict[str, tuple[str, ...]] = {}
    for key, local in tied.items():
        layers = [number for number, held in shared.items() if local <= held]
        rivals = [other for other, names_of_other in tied.items() if other != key and names_of_other == local]
        if not layers or rivals:
            has = f"the optimizer has the shared module `{key}` with {items_in_words(sorted(local), 3)}"
            if not layers:
                there = ranges_in_words(outline(part))
                raise IncompleteError(
                    f"{has}, which no file of a layer has; there are those of layers {there}",
                    hint="fetch all `layer_*-model_states.pt`: that of a layer which is shared may be missing",
                )
            raise FormatError(
                f"{has}, as `{rivals[0]}` has: which layers it belongs to is not recorded",
                hint="--weights model takes all parameters from the files of the layers",
            )
        places |= {f"tied_modules.{key}.{name}": tuple([f"{n}.{name}" for n in layers]) for name in local}
    return places


def _join_stages(own: Mapping[str, Sequence[Tensor]], part: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(name, master) of each parameter; the masters of several stages are replicas."""
    wrong = []
    for name, tensors in own.items():
        stored = part.get(name)
        shapes = {tensor.shape for tensor in tensors} | ({stored.shape} if stored is not None else set())
        if stored is None or len(shapes) > 1:
            there = "no file" if stored is None else f"{list(stored.shape)} in its file"
            wrong.append(f"{name}: {list(tensors[0].shape)} in the optimizer, {there}")
            continue
        yield name, join_replicas(tensors).rename(name)
    if wrong:
        raise FormatError(
            f"the optimizer's parameters are not those of the layers' files:\n{items_in_lines(wrong)}",
            hint=_ONE_RUN,
        )
