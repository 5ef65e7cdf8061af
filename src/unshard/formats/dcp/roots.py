"""Where in a training state the model's state dict lies: found by the recorded paths, not by taking keys apart.

`dcp.save` takes a dict of dicts and flattens it. Keys have dots themselves, so that `model.layers.0.weight` may be the
entry `layers.0.weight` of a dict `model`, or an entry of that name at the top; `planner_data` of the metadata records
which (torch `distributed/checkpoint/_nested_dict.py`). Every dict that holds tensors is a group here; a group is a
model's, an optimizer's, or of another state of training, told by the names on its path and in it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal, TypeAlias

from unshard.errors import NotACheckpointError, UsageError, command_line
from unshard.formats.dcp.metadata import Outline, Steps
from unshard.words import count_in_words, items_in_lines, one_line, shorten

Kind: TypeAlias = Literal["model", "optimizer", "other"]

_OPTIMIZER = re.compile(r"(\w+[_.-])?(optim|optims|optimizer|optimizers)([_.-]?(states?|dicts?|\d))*", re.I)
_OTHER = re.compile(
    r"(lr_?)?sched(uler)?s?|(data_?)?loaders?|data_?(set|iterator)s?|train(er|ing)?|rng|random|(grad_?)?scalers?|extra|metrics"
    r"|meters?|callbacks|loops|samplers?|progress",
    re.I,
)
"""States of training by a name on their path, whose ending (`_state`, `_states`, a number) does not count."""
_ENDING = re.compile(r"([_.-]?(states?|dicts?|\d))+$", re.I)
_LONGEST = 64
"""Characters of a name of such states. Names of parameters, which may be much longer, need not be matched."""

_PARAM_GROUPS = "param_groups"
"""What every optimizer's state dict has beside `state`, whatever it keeps of a parameter."""
_FLAT_OPTIMIZER = re.compile(r"(state|param_groups)\..+\.\w+")
"""Names in a flattened one (torch `checkpoint/state_dict.py`, `_flatten_optim_state_dict`)."""

_SHOWN = 200
"""Characters of a path or a name in messages."""

_MAIN = ("model", "module", "state_dict", "model_state_dict", "model_state")
"""The last step to the model that is meant, where others lie beside it (an average of it, a teacher)."""
_PARAMETER = re.compile(r".+\..+|\w*weight|\w*bias|lora_\w+")

_TOPS = re.compile(r"(model|lm_head|base_model|transformer|backbone|score|v_head|module|_orig_mod)\.")
"""How names in a language model's state dict begin (or its wrappers' do)."""
_PREFIXES = ("app.model.", "state.model.", "model.", "state_dict.", "module.")


@dataclass(slots=True)
class Group:
    """The tensors in one dict of the training state, or in the dicts below it.

    path:  the steps that lead there; empty for the training state itself.
    names: key → name in that dict.
    """

    path: Steps
    names: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The path for people, and for `--model-key`."""
        return one_line(shorten(".".join(map(str, self.path)), _SHOWN)) or "."

    def is_main(self) -> bool:
        """Whether it is named as the model that is meant."""
        return bool(self.path) and self.path[-1] in _MAIN

    def has_parameters(self) -> bool:
        """Whether a name is like those of parameters: not so `step` or `rng_state`, which lie beside models."""
        return any(_PARAMETER.fullmatch(name) for name in self.names.values())

    def kind(self, optimizers: Collection[Steps]) -> Kind:
        """What the tensors are; `optimizers` are the paths of dicts that an optimizer keeps of its parameters."""
        kinds = {_kind_by_name(str(step)) for step in self.path}
        inside = any(self.path[:count] in optimizers for count in range(1, len(self.path) + 1))
        if "optimizer" in kinds or inside or all(map(_FLAT_OPTIMIZER.fullmatch, self.names.values())):
            return "optimizer"
        return "other" if "other" in kinds else "model"


@dataclass(frozen=True, slots=True)
class Choice:
    """The model of a checkpoint, and what lies beside it.

    model:     its tensors, and how its dict was found (`recorded` paths, or guessed from names).
    optimizer: keys of tensors of optimizers; `other` those of other states; `models` further models.
    """

    model: Group
    recorded: bool
    optimizer: Sequence[str] = ()
    other: Sequence[str] = ()
    models: Sequence[Group] = ()


def choose_model(outline: Outline, place: Path, wanted: str | None = None) -> Choice:
    """The model's state dict in a training state.

    place:  the directory, for messages.
    wanted: the path that a person named, with dots; "." is the training state itself.

    Raises NotACheckpointError where there is none, or where there are several and none is named as the main one is;
    UsageError where nothing lies at `wanted`.
    """
    recorded = any(len(steps) > 0 for steps in outline.paths.values())
    groups = _group(outline.tensors, outline.paths if recorded else _guess_paths(outline.tensors))
    optimizers = {
        (*steps[: steps.index(_PARAM_GROUPS)], "state") for steps in outline.paths.values() if _PARAM_GROUPS in steps
    }
    kinds: dict[Kind, list[Group]] = {"model": [], "optimizer": [], "other": []}
    for group in groups:
        kinds[group.kind(optimizers)].append(group)
    if wanted is not None:
        model = _at(wanted, groups, kinds["model"], place)
    else:
        model = _choose(kinds["model"], place, has_optimizer=bool(kinds["optimizer"]))
    optimizer = [key for group in kinds["optimizer"] for key in group.names if key not in model.names]
    rest = [group for group in kinds["model"] if not group.names.keys() <= model.names.keys()]
    models = [group for group in rest if group.has_parameters()]
    beside = [group for group in (*kinds["other"], *rest) if group not in models]
    other = [key for group in beside for key in group.names if key not in model.names]
    return Choice(model, recorded, optimizer, other, models)


def _group(keys: Collection[str], paths: Mapping[str, Steps]) -> list[Group]:
    """The tensors by the dict that they lie in. A path that is not its key's is no path: it could double a name."""
    groups: dict[Steps, Group] = {}
    for key in keys:
        steps = paths.get(key, ())
        if not steps or ".".join(map(str, steps)) != key:
            steps = (key,)
        groups.setdefault(steps[:-1], Group(steps[:-1])).names[key] = str(steps[-1])
    return list(groups.values())


def _choose(models: Sequence[Group], place: Path, *, has_optimizer: bool) -> Group:
    likely = [group for group in models if group.has_parameters()]
    likely = likely or [group for group in models if group.is_main() or not has_optimizer]
    if not likely:
        what = "only the states of an optimizer" if has_optimizer else "no tensor of a model"
        hint = "the model may lie beside it: " + command_line("unshard", "inspect", place.absolute().parent)
        raise NotACheckpointError(f"{place}: holds {what}", hint=hint)
    if len(likely) == 1:
        return likely[0]
    main = [group for group in likely if group.is_main()]
    top = [group for group in likely if not group.path and (group.has_parameters() or not main)]
    if len(main) + len(top) == 1:
        return (*main, *top)[0]
    raise NotACheckpointError(
        f"{place}: {len(likely)} models are stored, and none is named as the one that is meant:\n{_listed(likely)}",
        hint="choose one: " + command_line("unshard", "inspect", place, "--model-key", likely[0].title),
    )


def _at(wanted: str, groups: Sequence[Group], models: Sequence[Group], place: Path) -> Group:
    """What lies at a path, in its own dict and in those below it; at the top, in its own dict alone."""
    found: Group | None = None
    for group in groups:
        depth = _depth(group.path, wanted)
        if depth is not None:
            found = found or Group(group.path[:depth])
            inner = [str(step) for step in group.path[depth:]]
            found.names |= {key: ".".join([*inner, name]) for key, name in group.names.items()}
    if found is None:
        known = f"; models are\n{_listed(models)}" if models else ""
        hint = "name one of these" if models else "leave `--model-key` out"
        raise UsageError(f"`--model-key {wanted}`: nothing lies there in {place}{known}", hint=hint)
    return found


def _depth(path: Steps, wanted: str) -> int | None:
    """How many of the first steps of a path are the ones that a person wrote with dots between them."""
    if wanted == ".":
        return None if path else 0
    return next((count for count in range(1, len(path) + 1) if ".".join(map(str, path[:count])) == wanted), None)


def _listed(groups: Sequence[Group]) -> str:
    lines = []
    for group in groups:
        some = ", ".join([one_line(shorten(name, _SHOWN)) for name in islice(group.names.values(), 2)])
        lines.append(f"{group.title}: {count_in_words(len(group.names), 'tensor')} ({some}, …)")
    return items_in_lines(lines)


def _kind_by_name(step: str) -> Kind | None:
    """What lies under this name in a training state, if it is no model."""
    if len(step) > _LONGEST:
        return None
    if _OPTIMIZER.fullmatch(step):
        return "optimizer"
    return "other" if _OTHER.fullmatch(_ENDING.sub("", step)) else None


def _guess_paths(keys: Collection[str]) -> dict[str, Steps]:
    """Paths by the names alone, where a planner recorded none: such a state was flat when it was saved.

    A prefix is taken off the model's names only where all have it and it can be no part of them: `model.` is one in
    `model.model.norm.weight`, and none in `model.norm.weight`. Where there is none, `sampler.weight` is a parameter
    of a module beside others; a state of training has no weights.
    """
    paths: dict[str, Steps] = {}
    own: list[str] = []
    modules: list[str] = []
    for key in keys:
        first, _, rest = key.partition(".")
        kind = _kind_by_name(first) if rest else None
        if kind is None:
            own.append(key)
            continue
        paths[key] = first, rest
        if kind == "other" and rest.endswith(("weight", "bias")):
            modules.append(key)
    prefix = next((prefix for prefix in _PREFIXES if _is_prefix(prefix, own)), "")
    if not prefix:
        own += modules
    steps = tuple(prefix.split(".")[:-1])
    return paths | {key: (*steps, key.removeprefix(prefix)) for key in own}


def _is_prefix(prefix: str, keys: Sequence[str]) -> bool:
    inner = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
    return len(inner) == len(keys) and ("." in prefix[:-1] or any(map(_TOPS.match, inner)))
