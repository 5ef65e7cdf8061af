"""What one model-parallel rank holds: masters where there are any, and what has none beside them.

Three kinds of tensors have no master: buffers, which keep their type; parameters that were not trained, which are
widened exactly, so that a model has one type; further names of shared parameters, which get the master of the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from unshard.checkpoint import Note, Shape
from unshard.dtypes import BF16, F16, F32
from unshard.errors import FormatError, IncompleteError, UnshardError
from unshard.formats.deepspeed.masters import join_pieces
from unshard.formats.deepspeed.states import FrozenPieces, ModelStates
from unshard.formats.deepspeed.stored import read_entry, unreadable
from unshard.formats.state_dict import read_whole
from unshard.formats.torch_file import StoredTensor
from unshard.tensors import Tensor
from unshard.words import count_in_words

_LOW = (BF16, F16)


@dataclass(slots=True)
class Widened:
    """Parameters that have no master, by name; those of low precision are widened to fp32."""

    names: list[str] = field(default_factory=list)

    def widen(
        self, tensors: Mapping[str, Tensor], mastered: Iterable[str], kept: Collection[str] = ()
    ) -> dict[str, Tensor]:
        """The tensors as they stand beside masters: all but `mastered` ones and buffers (`kept`) in fp32."""
        having = {*mastered, *kept}
        result: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if name not in having and tensor.dtype in _LOW:
                self.names.append(name)
                tensor = tensor.cast(F32)
            result[name] = tensor
        return result

    def note(self) -> Iterator[Note]:
        if self.names:
            parameters = count_in_words(len(self.names), "parameter")
            have = "has" if len(self.names) == 1 else "have"
            text = f"{parameters} without training {have} no masters: widened exactly to fp32, beside those that have"
            yield Note(text, tuple(self.names))


@dataclass(slots=True)
class ModuleWeights:
    """The tensors of one model-parallel rank as its files of model states have them.

    stored:   name → tensor; parameters that only lie in partitions are not among it.
    rounded:  name → the type in which the module held a parameter that lies in partitions only (stage 3).
    excluded: parameters that were left out at saving.
    order:    all names, in the order of the module.
    """

    stored: dict[str, Tensor]
    rounded: dict[str, StoredTensor]
    excluded: dict[str, Shape]
    order: list[str]

    def round(self, tensor: Tensor) -> Tensor:
        """A master in the type in which the module held the parameter, where it lies in partitions only."""
        placeholder = self.rounded.get(tensor.name)
        return tensor if placeholder is None else tensor.cast(placeholder.dtype)

    def in_order(self, tensors: Mapping[str, Tensor], shared: Mapping[str, str]) -> dict[str, Tensor]:
        """The tensors in the order of the module, then the others.

        shared: further name → name of parameters that have two; where the further one is not there, it gets the tensor
        of the other.
        """
        twice = {name: tensors[other].rename(name) for name, other in shared.items() if other in tensors}
        named = {**twice, **tensors}
        return {name: named[name] for name in dict.fromkeys([*self.order, *named]) if name in named}

    def without_values(self, tensors: Mapping[str, Tensor], shared: Mapping[str, str]) -> tuple[list[str], list[str]]:
        """The placeholders whose values `tensors` lacks: those that are lost, and those that were left out at saving.

        `exclude_frozen_parameters` leaves the name of a parameter out, and forgets its second one (a tied embedding).
        """
        lacking = [name for name in self.rounded if name not in tensors]
        known = {*self.order}
        left_out = [name for name in lacking if shared.get(name, name) not in known]
        return [name for name in lacking if name not in left_out], left_out


def read_weights(
    states: ModelStates, pieces: Sequence[FrozenPieces], rank: int, stage: int, problems: list[UnshardError]
) -> ModuleWeights:
    """The weights in the model states of one model-parallel rank `rank`, trained with ZeRO's `stage`.

    pieces: those of frozen parameters on all data-parallel ranks, at stages below 3 on one; none where some of them are
    missing, which is said elsewhere.
    """
    partitioned = {name: shape for group in states.groups or () for name, shape in group.items()}
    expected = partitioned | dict(states.frozen_shapes)
    expected |= {name: expected[other] for name, other in states.shared.items() if other in expected}
    weights = ModuleWeights({}, {}, {}, list(states.module))
    wrong: list[str] = []
    for name, value in states.module.items():
        may_be_elsewhere = name in expected or (stage == 3 and name not in states.buffers)
        if isinstance(value, StoredTensor) and value.shape == (0,) and may_be_elsewhere and expected.get(name) != (0,):
            weights.rounded[name] = value
            continue
        try:
            tensor = read_entry(name, value, rank)
        except FormatError as error:
            wrong.append(f"{name}: {error.message}")
            continue
        shape = partitioned.get(name)
        if tensor is not None and shape not in (None, tensor.shape):
            wrong.append(f"{name}: {list(tensor.shape)} in the module, {list(shape or ())} in `param_shapes`")
        elif tensor is not None:
            weights.stored[name] = tensor
    if wrong:
        problems.append(unreadable(wrong, states.file))
    _read_frozen(states, pieces, weights, problems)
    known = weights.stored.keys() | partitioned.keys() | states.shared.keys()
    if pieces:
        weights.excluded = {name: shape for name, shape in states.frozen_shapes.items() if name not in known}
    weights.order += [name for name in (*partitioned, *weights.stored) if name not in states.module]
    return weights


def _read_frozen(
    states: ModelStates, pieces: Sequence[FrozenPieces], weights: ModuleWeights, problems: list[UnshardError]
) -> None:
    """The frozen parameters that the module has no values of, from `frozen_param_fragments`."""
    for name, shape in states.frozen_shapes.items():
        fragment = states.frozen.get(name)
        if name in weights.stored or fragment is None or not pieces:
            continue
        if fragment.shape == shape and name not in weights.rounded:
            weights.stored[name] = Tensor(name, fragment.dtype, shape, read_whole(fragment, None))
            continue
        found = [(rank, one.frozen[name]) for rank, one in enumerate(pieces) if name in one.frozen]
        try:
            if len(found) < len(pieces):
                absent = next(one for one in pieces if name not in one.frozen)
                raise IncompleteError(f"{absent.file.name}: has no piece of the frozen parameter `{name}`")
            weights.stored[name] = join_pieces(name, shape, found)
        except UnshardError as error:
            problems.append(error)
            return


def same_parameters(states: ModelStates) -> dict[str, str]:
    """Further name → the name whose parameter it is: as recorded, and where two names are the same memory."""
    trained = {name for group in states.groups or () for name in group}
    memory = {_place(value): name for name, value in states.module.items() if name in trained and _has_elements(value)}
    shared = dict(states.shared)
    for name, value in states.module.items():
        if name not in trained and _has_elements(value):
            other = memory.get(_place(value))
            if other is not None:
                shared.setdefault(name, other)
    return {name: other for name, other in shared.items() if name not in trained}


def second_names(left_out: Sequence[str]) -> Iterator[Note]:
    """A note on second names of parameters that were left out at saving."""
    if left_out:
        names = count_in_words(len(left_out), "parameter")
        yield Note(f"{names} left out at saving had a second name, which has no values either", tuple(left_out))


def _has_elements(value: object) -> bool:
    return isinstance(value, StoredTensor) and 0 not in value.shape


def _place(tensor: StoredTensor) -> tuple[object, ...]:
    storage = tensor.storage
    return storage.file, storage.offset, tensor.offset, tensor.shape, tensor.strides
