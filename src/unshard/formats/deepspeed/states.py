"""Files of model states: the module, which parameters ZeRO partitions and in which order, and what else is recorded.

Source: DeepSpeed `runtime/engine.py` (`_save_checkpoint`, `_get_zero_param_shapes`, `_get_shared_params`,
`_get_zero_frozen_param_attributes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from unshard.checkpoint import Shape
from unshard.errors import FormatError
from unshard.formats.deepspeed.files import File
from unshard.formats.deepspeed.stored import read_content
from unshard.formats.nested import flatten
from unshard.formats.torch_file import StoredTensor

_MAX_DIMENSIONS = 64
_MAX_ELEMENTS = 1 << 60
"""Of a parameter; of an empty one, of its other axes: readers of safetensors multiply them."""


@dataclass(frozen=True, slots=True, eq=False)
class FrozenPieces:
    """What one data-parallel rank's file of stage 3 has of parameters that are not trained; `step`: `global_steps`."""

    file: File
    step: int | None
    frozen: Mapping[str, StoredTensor]


@dataclass(frozen=True, slots=True, eq=False)
class ModelStates:
    """What one file of model states says.

    module:   stored name → tensor, as stored; at stage 3 parameters are placeholders of shape [0].
    buffers:  names of persistent buffers among them.
    groups:   the trained parameters by the optimizer's group (stage 3: sub-group), in the order of the flat masters;
              None where nothing is partitioned.
    frozen_shapes, frozen: the same of parameters that are not trained, and their values: whole, at stage 3 this
              rank's piece. Empty where they were not saved, or lie in the module alone (stage 1).
    shared:   further name → name of a parameter that has two; only rank 0 tells.
    step:     `global_steps`.
    recorded: the whole file's dict, for what only some checkpoints have.
    """

    file: File
    module: Mapping[str, Any]
    buffers: frozenset[str]
    groups: tuple[Mapping[str, Shape], ...] | None
    frozen_shapes: Mapping[str, Shape]
    frozen: Mapping[str, StoredTensor]
    shared: Mapping[str, str]
    step: int | None
    recorded: Mapping[str, Any]

    @property
    def has_nameless_masters(self) -> bool:
        """Whether a job without ZeRO saved masters: by their number, and nothing says which parameters they are.

        Source: DeepSpeed `runtime/fp16/unfused_optimizer.py` and `fused_optimizer.py` (`state_dict`).
        """
        optimizer = self.recorded.get("optimizer")
        return isinstance(optimizer, Mapping) and any(key in optimizer for key in ("fp32_groups", "fp32_groups_flat"))

    @property
    def config(self) -> Mapping[str, Any]:
        """`ds_config`, as far as it is one."""
        config = self.recorded.get("ds_config")
        return config if isinstance(config, Mapping) else {}

    @property
    def stage(self) -> int:
        """The stage of ZeRO that was configured; where that is not recorded, as the file's name tells."""
        zero = self.config.get("zero_optimization")
        stage = zero.get("stage") if isinstance(zero, Mapping) else None
        if type(stage) is int:
            return stage
        return 3 if self.file.path.name.startswith("zero_pp_rank") else 0

    @property
    def pieces(self) -> FrozenPieces:
        """What it has of parameters that are not trained."""
        return FrozenPieces(self.file, self.step, self.frozen)


def read_model_states(file: File) -> ModelStates:
    """The content of a file of model states. Raises FormatError where it is none."""
    root = _read_root(file)
    module = root.get("module")
    if not isinstance(module, Mapping) and module is not None:
        raise FormatError(f"{file.name}: its `module` is a {type(module).__name__}, not a state dict")
    try:
        return ModelStates(
            file,
            dict(flatten(module or {}, str(file.name))),
            frozenset(_names(root.get("buffer_names"), "buffer_names")),
            _read_groups(root.get("param_shapes")),
            _read_shapes(root.get("frozen_param_shapes") or {}, "frozen_param_shapes"),
            _read_frozen(root),
            dict(_pairs(root.get("shared_params"))),
            _read_step(root),
            root,
        )
    except FormatError as error:
        raise FormatError(f"{file.name}: {error.message}", hint=error.hint) from error


def read_frozen_pieces(file: File) -> FrozenPieces:
    """The pieces in a file of model states; all else is forgotten. Raises FormatError where it is no such file."""
    root = _read_root(file)
    try:
        return FrozenPieces(file, _read_step(root), _read_frozen(root))
    except FormatError as error:
        raise FormatError(f"{file.name}: {error.message}", hint=error.hint) from error


def _read_root(file: File) -> Mapping[str, Any]:
    root = read_content(file)
    if not isinstance(root, Mapping) or not ("module" in root or "param_shapes" in root):
        raise FormatError(f"{file.name}: holds no model states of DeepSpeed: neither `module` nor `param_shapes`")
    return root


def _read_step(root: Mapping[str, Any]) -> int | None:
    step = root.get("global_steps")
    return step if type(step) is int else None


def _read_frozen(root: Mapping[str, Any]) -> dict[str, StoredTensor]:
    return dict(_tensors(root.get("frozen_param_fragments") or {}, "frozen_param_fragments"))


def _read_groups(recorded: Any) -> tuple[Mapping[str, Shape], ...] | None:
    """`param_shapes`: a list of dicts; one dict in releases that knew a single group."""
    if recorded is None:
        return None
    groups = [recorded] if isinstance(recorded, Mapping) else recorded
    if not isinstance(groups, (list, tuple)):
        raise FormatError("its `param_shapes` is no list")
    read = tuple([_read_shapes(group, "param_shapes") for group in groups])
    names = [name for group in read for name in group]
    if len(names) != len(set(names)):
        raise FormatError("its `param_shapes` has a parameter in two groups")
    return read


def _read_shapes(recorded: Any, what: str) -> dict[str, Shape]:
    if not isinstance(recorded, Mapping):
        raise FormatError(f"its `{what}` is a {type(recorded).__name__}, not a dict")
    shapes: dict[str, Shape] = {}
    for name, shape in recorded.items():
        if not isinstance(name, str) or not _is_shape(shape):
            raise FormatError(f"its `{what}` has an entry that is no shape")
        shapes[name] = tuple(shape)
    return shapes


def _is_shape(value: Any) -> bool:
    return (
        isinstance(value, (tuple, list))
        and len(value) <= _MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size <= _MAX_ELEMENTS for size in value)
        and prod([size for size in value if size]) <= _MAX_ELEMENTS
    )


def _names(recorded: Any, what: str) -> Sequence[str]:
    if recorded is None:
        return ()
    if not isinstance(recorded, (list, tuple)) or not all(isinstance(name, str) for name in recorded):
        raise FormatError(f"its `{what}` is no list of names")
    return recorded


def _tensors(recorded: Any, what: str) -> Iterator[tuple[str, StoredTensor]]:
    if not isinstance(recorded, Mapping):
        raise FormatError(f"its `{what}` is a {type(recorded).__name__}, not a dict")
    for name, value in recorded.items():
        if not isinstance(name, str) or not isinstance(value, StoredTensor):
            raise FormatError(f"its `{what}` has an entry that is no tensor")
        yield name, value


def _pairs(recorded: Any) -> Iterator[tuple[str, str]]:
    """`shared_params`: a dict; a list of pairs in older releases."""
    if not isinstance(recorded, (Mapping, list, tuple, type(None))):
        raise FormatError(f"its `shared_params` is a {type(recorded).__name__}, not a dict")
    entries = recorded.items() if isinstance(recorded, Mapping) else recorded or ()
    for entry in entries:
        if not isinstance(entry, (tuple, list)) or len(entry) != 2 or not all(isinstance(name, str) for name in entry):
            raise FormatError("its `shared_params` has an entry that is no pair of names")
        yield entry[0], entry[1]
