"""The steps of rules: what happens to a tensor between the names of one framework and those of another.

A step works on all pieces of a tensor at once. Forward takes the whole apart, backward puts it together again; both
only re-box chunks. Sizes are expressions over the config (see `Sizes`). Unless a docstring says otherwise, rows are
counted along the first axis.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol, TypeAlias

from unshard.families.functions import SHIFT
from unshard.families.sizes import Sizes
from unshard.tensors import Computed, Tensor, Value, concat, stack

Key: TypeAlias = tuple[int, ...]
"""Where a piece is: one number per step that fanned out, outermost first."""
Pieces: TypeAlias = dict[Key, Tensor]
Parts: TypeAlias = dict[Key, Value]


class Step(Protocol):
    """One operation on all pieces of a tensor. `fan` is the wildcard it binds, "part" for the part, or None."""

    @property
    def fan(self) -> str | None: ...

    def forward(self, pieces: Parts, parts: int, sizes: Sizes) -> Parts:
        """Take each piece apart; a step that fans out appends a number to each key. `parts`: how many the rule has.

        Raises ValueError for pieces that cannot be cut so.
        """
        ...

    def backward(self, pieces: Parts, parts: int, sizes: Sizes) -> Parts:
        """The inverse. Raises ValueError for pieces that do not fit together."""
        ...


class _OnEach(ABC):
    """A step that changes every piece by itself, and fans out nowhere."""

    __slots__ = ()

    @property
    def fan(self) -> None:
        return None

    def forward(self, pieces: Parts, _parts: int, sizes: Sizes) -> Parts:
        return {key: self.change(piece, sizes) for key, piece in pieces.items()}

    def backward(self, pieces: Parts, _parts: int, sizes: Sizes) -> Parts:
        return {key: self.restore(piece, sizes) for key, piece in pieces.items()}

    @abstractmethod
    def change(self, piece: Value, sizes: Sizes) -> Value: ...

    @abstractmethod
    def restore(self, piece: Value, sizes: Sizes) -> Value: ...


# Steps that fan out ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unstack:
    """Tensors stacked along the first axis, one for each value of a wildcard: packed experts."""

    fan: str

    def forward(self, pieces: Parts, _parts: int, _sizes: Sizes) -> Parts:
        return {(*key, i): one for key, piece in pieces.items() for i, one in enumerate(_unstack(piece))}

    def backward(self, pieces: Parts, _parts: int, _sizes: Sizes) -> Parts:
        return {key: stack(ones) for key, ones in _gather(pieces).items()}


@dataclass(frozen=True, slots=True)
class Divide:
    """As many equal consecutive pieces along an axis as the rule has parts: gate and up."""

    axis: int = 0

    @property
    def fan(self) -> str:
        return "part"

    def forward(self, pieces: Parts, parts: int, _sizes: Sizes) -> Parts:
        divided: Parts = {}
        for key, piece in pieces.items():
            width, rest = divmod(_length(piece, self.axis), parts)
            if rest:
                raise ValueError(f"{piece.name}: {list(piece.shape)} does not divide by {parts} along axis {self.axis}")
            divided |= {(*key, i): piece.slice(self.axis, i * width, (i + 1) * width) for i in range(parts)}
        return divided

    def backward(self, pieces: Parts, _parts: int, _sizes: Sizes) -> Parts:
        return {key: concat(ones, self.axis) for key, ones in _gather(pieces).items()}


@dataclass(frozen=True, slots=True)
class Sections:
    """Rows that are `groups` times the same consecutive sections; each part gets its section of all groups.

    The first axis is row-major [groups, sum(rows)]; part i is [groups, rows[i]]. Grouped attention has a group of
    queries, one key and one value head for each key head; with one group the sections are merely consecutive.
    """

    rows: tuple[str, ...]
    groups: str = "1"

    @property
    def fan(self) -> str:
        return "part"

    def forward(self, pieces: Parts, _parts: int, sizes: Sizes) -> Parts:
        groups, rows = _layout(self.groups, self.rows, sizes)
        return {
            (*key, i): part
            for key, piece in pieces.items()
            for i, part in enumerate(_take_sections(_stored(piece), groups, rows))
        }

    def backward(self, pieces: Parts, _parts: int, sizes: Sizes) -> Parts:
        groups, rows = _layout(self.groups, self.rows, sizes)
        return {key: _join_sections(ones, groups, rows) for key, ones in _gather(pieces).items()}


# Steps on each piece --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Transpose(_OnEach):
    """The last two axes swapped; its own inverse."""

    def change(self, piece: Value, _sizes: Sizes) -> Tensor:
        return _stored(piece).transpose()

    def restore(self, piece: Value, sizes: Sizes) -> Tensor:
        return self.change(piece, sizes)


@dataclass(frozen=True, slots=True)
class Squeeze(_OnEach):
    """The first axis, of length one, left out: a stack of one expert."""

    def change(self, piece: Value, _sizes: Sizes) -> Tensor:
        if piece.shape[:1] != (1,):
            raise ValueError(f"{piece.name} has shape {list(piece.shape)}, whose first axis is not of length 1")
        return _stored(piece).reshape(piece.shape[1:])

    def restore(self, piece: Value, _sizes: Sizes) -> Tensor:
        return _stored(piece).reshape((1, *piece.shape))


@dataclass(frozen=True, slots=True)
class Ungroup(_OnEach):
    """Rows of groups of sections become the sections, each with all its groups: what `Sections` parts, in one tensor.

    [groups, sum(rows)] becomes [groups, rows[0]], [groups, rows[1]], … one behind the other.
    """

    rows: tuple[str, ...]
    groups: str

    def change(self, piece: Value, sizes: Sizes) -> Tensor:
        groups, rows = _layout(self.groups, self.rows, sizes)
        return concat(_take_sections(_stored(piece), groups, rows), 0)

    def restore(self, piece: Value, sizes: Sizes) -> Tensor:
        groups, rows = _layout(self.groups, self.rows, sizes)
        tensor = _stored(piece)
        if tensor.shape[:1] != (groups * sum(rows),):
            raise ValueError(_misfit(tensor, groups, rows))
        return _join_sections(tensor.split(0, [groups * count for count in rows]), groups, rows)


@dataclass(frozen=True, slots=True)
class Group(_OnEach):
    """The inverse of `Ungroup`, as a step on the way forward."""

    rows: tuple[str, ...]
    groups: str

    def change(self, piece: Value, sizes: Sizes) -> Tensor:
        return Ungroup(self.rows, self.groups).restore(piece, sizes)

    def restore(self, piece: Value, sizes: Sizes) -> Tensor:
        return Ungroup(self.rows, self.groups).change(piece, sizes)


@dataclass(frozen=True, slots=True)
class Permute(_OnEach):
    """One axis, seen as several (`shape`, row-major), with these in another order: interleaved gates, rotary halves.

    One of the sizes may be "?": whatever is left.
    """

    shape: tuple[str, ...]
    order: tuple[int, ...]
    axis: int = 0

    def change(self, piece: Value, sizes: Sizes) -> Tensor:
        return self._reorder(_stored(piece), self._resolve(piece, sizes), self.order)

    def restore(self, piece: Value, sizes: Sizes) -> Tensor:
        shape = self._resolve(piece, sizes)
        inverse = tuple([self.order.index(place) for place in range(len(self.order))])
        return self._reorder(_stored(piece), [shape[place] for place in self.order], inverse)

    def _resolve(self, piece: Value, sizes: Sizes) -> list[int]:
        length = _length(piece, self.axis)
        told = prod([sizes.size(size) for size in self.shape if size != "?"])
        known = [length // max(1, told) if size == "?" else sizes.size(size) for size in self.shape]
        if prod(known) != length:
            raise ValueError(f"{piece.name}: axis {self.axis} of {list(piece.shape)} is not {' x '.join(self.shape)}")
        return known

    def _reorder(self, tensor: Tensor, shape: Sequence[int], order: Sequence[int]) -> Tensor:
        before, after = tensor.shape[: self.axis], tensor.shape[self.axis + 1 :]
        fine = tensor.reshape((*before, *shape, *after))
        first, count = self.axis, len(shape)
        places = (*range(first), *[first + place for place in order], *range(first + count, fine.ndim))
        return fine.transpose(places).reshape(tensor.shape)


@dataclass(frozen=True, slots=True)
class SwapHalves(_OnEach):
    """The two halves of an axis in the other order; its own inverse."""

    axis: int = 0

    def change(self, piece: Value, _sizes: Sizes) -> Tensor:
        tensor = _stored(piece)
        half, rest = divmod(_length(tensor, self.axis), 2)
        if rest:
            raise ValueError(f"{piece.name}: {list(piece.shape)} has no halves along axis {self.axis}")
        return concat([tensor.slice(self.axis, half, 2 * half), tensor.slice(self.axis, 0, half)], self.axis)

    def restore(self, piece: Value, sizes: Sizes) -> Tensor:
        return self.change(piece, sizes)


@dataclass(frozen=True, slots=True)
class FirstRows(_OnEach):
    """The first `count` rows: the vocabulary without its padding. The way back leaves the padding to be filled."""

    count: str

    def change(self, piece: Value, sizes: Sizes) -> Value:
        count = sizes.known(self.count)
        return piece if count is None or _length(piece, 0) <= count else piece.slice(0, 0, count)

    def restore(self, piece: Value, _sizes: Sizes) -> Value:
        return piece


@dataclass(frozen=True, slots=True)
class Norm(_OnEach):
    """The weight of a norm, which the model in transformers uses as it is, or (`zero_centred`) as 1 + weight.

    Megatron does the latter under `apply_layernorm_1p`. Where both do the same, the weight is copied; else 1 is added
    or taken away in float32, and the result rounded once.
    """

    zero_centred: bool = False

    def change(self, piece: Value, sizes: Sizes) -> Value:
        return self._shift(piece, sizes.flag("megatron.apply_layernorm_1p") - self.zero_centred)

    def restore(self, piece: Value, sizes: Sizes) -> Value:
        return self._shift(piece, self.zero_centred - sizes.flag("megatron.apply_layernorm_1p"))

    def _shift(self, piece: Value, by: int) -> Value:
        if by == 0:
            return piece
        tensor = _stored(piece)
        _length(tensor, 0)  # a scalar has no axis to cut along
        cuts = tuple([(axis,) for axis in range(tensor.ndim)])
        return Computed(tensor.name, tensor.dtype, tensor.shape, SHIFT, {"by": by}, (tensor,), cuts[0], cuts[1:])


@dataclass(frozen=True, slots=True)
class OnPart:
    """A step on one part alone, behind the step that made the parts."""

    part: int
    step: Step

    @property
    def fan(self) -> None:
        return None

    def forward(self, pieces: Parts, parts: int, sizes: Sizes) -> Parts:
        return pieces | self.step.forward(self._mine(pieces), parts, sizes)

    def backward(self, pieces: Parts, parts: int, sizes: Sizes) -> Parts:
        return pieces | self.step.backward(self._mine(pieces), parts, sizes)

    def _mine(self, pieces: Parts) -> Parts:
        return {key: piece for key, piece in pieces.items() if key[-1] == self.part}


STEPS: Mapping[str, type[Step]] = {
    "unstack": Unstack,
    "divide": Divide,
    "sections": Sections,
    "transpose": Transpose,
    "squeeze": Squeeze,
    "ungroup": Ungroup,
    "group": Group,
    "permute": Permute,
    "swap_halves": SwapHalves,
    "first_rows": FirstRows,
    "norm": Norm,
    "on_part": OnPart,
}
"""By the names that a file of rules gives them."""

# Inside ---------------------------------------------------------------------------------------------------------------


def _unstack(piece: Value) -> Sequence[Value]:
    if isinstance(piece, Tensor):
        return piece.unstack()
    return [piece.select(0, index) for index in range(piece.shape[0])]


def _stored(piece: Value) -> Tensor:
    """The piece, if its bytes are stored. ValueError for computed ones, which know only plain cuts."""
    if isinstance(piece, Tensor):
        return piece
    raise ValueError(f"{piece.name}: what `{piece.function}` computes cannot be rearranged")


def _length(piece: Value, axis: int) -> int:
    """The length of an axis. ValueError for a tensor that has no such axis, as a scalar has none."""
    if axis >= len(piece.shape):
        raise ValueError(f"{piece.name} has shape {list(piece.shape)}, and no axis {axis}")
    return piece.shape[axis]


def _gather(pieces: Mapping[Key, Value]) -> dict[Key, list[Tensor]]:
    """The pieces that agree but for the last number of their keys, in its order."""
    groups: dict[Key, list[Tensor]] = {}
    for key in sorted(pieces):
        groups.setdefault(key[:-1], []).append(_stored(pieces[key]))
    return groups


def _layout(groups: str, rows: Sequence[str], sizes: Sizes) -> tuple[int, list[int]]:
    return sizes.size(groups), [sizes.size(count) for count in rows]


def _misfit(tensor: Tensor, groups: int, rows: Sequence[int]) -> str:
    sections = " + ".join([str(count) for count in rows])
    whole = f"{groups} x ({sections})" if groups != 1 else sections
    found = tensor.shape[0] if tensor.shape else "no"
    return f"{tensor.name} has {found} rows, where the config makes it {whole} = {groups * sum(rows)}"


def _take_sections(tensor: Tensor, groups: int, rows: Sequence[int]) -> list[Tensor]:
    """[groups, sum(rows), …] → one tensor [groups * rows[i], …] per section."""
    if tensor.shape[:1] != (groups * sum(rows),):
        raise ValueError(_misfit(tensor, groups, rows))
    rest = tensor.shape[1:]
    grouped = tensor.reshape((groups, sum(rows), *rest))
    return [part.reshape((groups * count, *rest)) for part, count in zip(grouped.split(1, rows), rows, strict=True)]


def _join_sections(parts: Sequence[Tensor], groups: int, rows: Sequence[int]) -> Tensor:
    """The inverse of `_take_sections`."""
    for part, count in zip(parts, rows, strict=True):
        if part.shape[:1] != (groups * count,):
            raise ValueError(f"{part.name} has shape {list(part.shape)}, not {groups} x {count} rows")
    grouped = [part.reshape((groups, count, *part.shape[1:])) for part, count in zip(parts, rows, strict=True)]
    whole = concat(grouped, 1)
    return whole.reshape((groups * sum(rows), *whole.shape[2:]))
