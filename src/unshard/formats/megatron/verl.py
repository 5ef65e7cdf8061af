"""verl's directories of one role (`actor`, `critic`), in which Megatron's weights lie in one of several places.

| layout | model                                           | adapters                                            |
|--------|-------------------------------------------------|-----------------------------------------------------|
| 1      | `dist_ckpt/`, or `huggingface/` beside          | in `dist_ckpt/`, or `adapter_checkpoint/`           |
|        | a `dist_ckpt/` of other states                  |                                                     |
| 2      | `model/dist_ckpt/`, or `model/huggingface/`     | in `model/dist_ckpt/`, `model/huggingface/adapter/` |

`ckpt_contents.json` of layout 2 is written last. Sources: volcengine/verl and verl-project/verl
verl/utils/checkpoint/megatron_checkpoint_manager.py, verl/utils/megatron_utils.py. Its oldest layout,
`model/mp_rank_*/model.pt`, is read as Megatron's directories of ranks are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unshard.checkpoint import Checkpoint, Note
from unshard.errors import FormatError, IncompleteError, NotACheckpointError, UnshardError, command_line
from unshard.formats.contract import Format, Source
from unshard.formats.huggingface.assets import read_config
from unshard.formats.huggingface.reader import HuggingFace
from unshard.formats.megatron.adapter_files import DIRECTORY, ROOT, VerlAdapter
from unshard.formats.megatron.distributed import MegatronDist, MegatronFsdp

_MODEL = "model"
_DIST = "dist_ckpt"
_HUGGINGFACE = "huggingface"
_ADAPTER = ".adapter."
_MANIFEST = "ckpt_contents.json"
_OTHER_STATES = ("optimizer", "extra")
"""Beside `model`; each has a `dist_ckpt` of its own, without weights."""


@dataclass(frozen=True, slots=True)
class Role:
    """What of a model lies in a role's directory; None for what does not.

    layout:   1 or 2.
    dist:     Megatron's weights and the format that reads them, though there may be none of the model among them.
    export:   weights of a Hugging Face model.
    peft:     an adapter that was exported for PEFT.
    adapters: verl's adapter files.
    """

    place: Path
    layout: int
    dist: tuple[Format, Path] | None
    export: Path | None
    peft: Path | None
    adapters: Path | None


def find_role(path: Path) -> Role | None:
    """The role at exactly this path, or None if none of verl's layouts lies there."""
    if not path.is_dir():
        return None
    layout = 2 if any((path / _MODEL / name).is_dir() for name in (_DIST, _HUGGINGFACE)) else 1
    base = path / _MODEL if layout == 2 else path
    weights = base / _DIST
    if layout == 1 and not weights.is_dir():
        return None
    dist = next(((kind, weights) for kind in (MegatronDist(), MegatronFsdp()) if kind.detect(weights)), None)
    export, peft = base / _HUGGINGFACE, base / _HUGGINGFACE / "adapter"
    adapters = path / DIRECTORY
    role = Role(
        path,
        layout,
        dist,
        export if HuggingFace().detect(export) else None,
        peft if HuggingFace().detect(peft) else None,
        adapters if VerlAdapter().detect(adapters) else None,
    )
    return role if role.dist or role.export or role.peft else None


def find_role_above(path: Path) -> Role | None:
    """The role of which the path is a part: its `model`, its `dist_ckpt`, or that of its `model`.

    Raises NotACheckpointError for the parts that hold no weights.
    """
    place = path.absolute()
    part = place.parent if place.name == _DIST and place.parent.name in (_MODEL, *_OTHER_STATES) else place
    if part.name not in (_MODEL, _DIST, *_OTHER_STATES):
        return None
    role = find_role(part.parent)
    if role is not None and part.name in _OTHER_STATES:
        hint = "the model lies beside it: " + command_line("unshard", "inspect", role.place)
        raise NotACheckpointError(f"{path}: holds the state of `{part.name}`, no weights", hint=hint)
    return role


class Verl:
    """The format: a role's directory. The weights are read by the formats of the places in which they lie."""

    name = "verl_megatron"
    backends: Sequence[str] = ("megatron",)

    def detect(self, path: Path) -> str | None:
        role = find_role(path)
        if role is None:
            return None
        if role.dist is None:
            return f"verl's layout {role.layout} of Megatron checkpoints, exported for transformers"
        return f"verl's layout {role.layout} of Megatron checkpoints: {role.dist[0].detect(role.dist[1])}"

    def read(self, source: Source) -> Checkpoint:
        """The catalog of the model. NotACheckpointError where there is none, and what the formats below raise."""
        role = find_role(source.path)
        if role is None:
            raise NotACheckpointError(f"{source.path}: none of verl's layouts of Megatron checkpoints lies here")
        checkpoint = self._read_model(role, source)
        notes, problems = _check_manifest(role)
        return replace(checkpoint, notes=(*notes, *checkpoint.notes), problems=(*problems, *checkpoint.problems))

    def _read_model(self, role: Role, source: Source) -> Checkpoint:
        exported = role.export or role.peft
        notes: list[Note] = []
        if role.dist is not None:
            kind, place = role.dist
            checkpoint = kind.read(_at(source, place))
            if checkpoint.tensors or (exported is None and role.adapters is None):
                return _note_export(_add_adapters(checkpoint, role, source), role)
            notes = [Note(problem.message) for problem in checkpoint.problems]
        if exported is None:
            assert role.adapters is not None
            checkpoint = VerlAdapter().read(_at(source, role.adapters))
            text = f"`{DIRECTORY}` holds the adapters, and no base model lies beside them"
            return replace(checkpoint, notes=(*notes, Note(text), *checkpoint.notes))
        checkpoint = HuggingFace().read(_at(source, exported))
        text = (
            f"the model lies only in `{exported.relative_to(role.place)}`, which is a Hugging Face directory: read it"
        )
        return replace(checkpoint, notes=(*notes, Note(text), *checkpoint.notes, *_unread_adapters(role, exported)))


def _at(source: Source, place: Path) -> Source:
    """The same question about a place below the role, in the further roots too."""
    inner = place.relative_to(source.path)
    also = [path / inner if (path / inner).is_dir() else path for path in source.also]
    return replace(source, path=place, also=tuple(also))


def _add_adapters(checkpoint: Checkpoint, role: Role, source: Source) -> Checkpoint:
    """The catalog with the adapters of verl's adapter files, unless it has adapters already."""
    if role.adapters is None:
        return checkpoint
    if any(_ADAPTER in name for name in checkpoint.tensors):
        text = f"`{DIRECTORY}` holds the adapters once more; those in `{_DIST}` were taken"
        return replace(checkpoint, notes=(*checkpoint.notes, Note(text)))
    from unshard.formats.megatron.adapter_reading import read_adapter_files  # late: few roles have such files

    try:
        found = read_adapter_files(role.adapters, source.add_told(checkpoint.facts), source.axes)
    except UnshardError as error:
        return replace(checkpoint, problems=(*checkpoint.problems, error))
    return replace(
        checkpoint,
        tensors={**checkpoint.tensors, **found.tensors},
        roots={**checkpoint.roots, ROOT: role.adapters},
        notes=(*checkpoint.notes, Note(f"the adapters lie in `{DIRECTORY}`"), *found.notes),
        problems=(*checkpoint.problems, *found.problems),
    )


def _note_export(checkpoint: Checkpoint, role: Role) -> Checkpoint:
    """Say that a Hugging Face export beside Megatron's weights was not read."""
    if role.export is None:
        return checkpoint
    what = "base model" if all(_ADAPTER in name for name in checkpoint.tensors) else "model"
    text = f"`{role.export.relative_to(role.place)}` holds the {what} too, as exported at that step; it was not read"
    return replace(checkpoint, notes=(*checkpoint.notes, Note(text)))


def _unread_adapters(role: Role, read: Path) -> Sequence[Note]:
    """A warning for adapters beside a base model in transformers' names, to which they cannot be added."""
    places = [place for place in (role.peft, role.adapters) if place is not None and place != read]
    return [
        Note(
            f"`{place.relative_to(role.place)}` holds LoRA adapters, which were not read; name it to merge them",
            (),
            "warning",
        )
        for place in places
    ]


def _check_manifest(role: Role) -> tuple[Sequence[Note], Sequence[UnshardError]]:
    """What `ckpt_contents.json` of layout 2 says of the save, and what is wrong with that."""
    if role.layout != 2:
        return (), ()
    path = role.place / _MANIFEST
    if not path.is_file():
        text = f"{_MANIFEST} is missing, which verl writes last: the save may have been cut short"
        return (Note(text, level="warning"),), ()
    try:
        manifest = read_config(path)
    except FormatError as error:
        return (), (FormatError(error.message, hint="mend the file, or delete it: it only tells what was saved"),)
    missing = _missing_model(role.place, manifest)
    if missing is None:
        return (), ()
    hint = "fetch it, or look at what is there: " + command_line("ls", role.place)
    return (), (IncompleteError(f"{path}: the model was saved to `{missing}`, which is not there", hint=hint),)


def _missing_model(place: Path, manifest: Mapping[str, Any]) -> str | None:
    """The place that the manifest names for the model, if nothing is there."""
    contents = manifest.get("contents")
    model = contents.get("model") if isinstance(contents, Mapping) else None
    named = model.get("path") if isinstance(model, Mapping) else None
    return named if isinstance(named, str) and not (place / named).is_dir() else None
