"""The order of parameters in a flat parameter, found by values.

A reference model in safetensors says which parameters there are, but lists them by name: nothing in it tells in which
order the modules were defined, and a wrong order of parameters whose sizes add up is a wrong model without any error.
Its values tell: training moves weights by little, so that every parameter is recognised where it begins and ends. What
values cannot tell apart is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from unshard.checkpoint import Checkpoint
from unshard.errors import ModelError
from unshard.files import OpenFiles
from unshard.tensors import Chunk, Tensor

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Values = npt.NDArray[np.float64]

_SAMPLE = 1024
"""Elements compared at each end of a parameter."""
_GLANCE = 64
"""Elements that are looked at before the ends are read."""
_MAX_DISTANCE = 0.5
"""Relative distance below which values are the same parameter, trained; unrelated weights are at about 1.4."""
_MAX_STEPS = 20_000
_HINT = "name the model that the training began with: --shapes-from DIR"


def order_by_values(
    flat: Tensor, names: Sequence[str], roots: Mapping[str, Path], reference: Checkpoint
) -> list[str] | None:
    """`names` in the order in which `flat`, a one-dimensional tensor without padding, holds them.

    A few kilobytes of each parameter are read. None where the values of `reference` are not found there. Raises
    ModelError where they fit two parameters equally well that do not hold the same.
    """
    search = _Search(flat, roots, reference, {name: reference.tensors[name].size for name in names})
    order = search.run()
    if order is not None:
        search.check_twins(order)
    return order


@dataclass(slots=True)
class _Search:
    """Tries parameters one behind the other, the most alike first, and turns back where none fits."""

    flat: Tensor
    roots: Mapping[str, Path]
    reference: Checkpoint
    sizes: Mapping[str, int]
    steps: int = 0
    _ends: dict[str, Values] = field(default_factory=dict)

    def run(self) -> list[str] | None:
        if sum(self.sizes.values()) != self.flat.size:
            return None
        order: list[str] = []
        start = 0
        waiting = [self._candidates(0, order)]
        while waiting and self.steps < _MAX_STEPS:
            if not waiting[-1]:
                waiting.pop()
                if order:
                    start -= self.sizes[order.pop()]
                continue
            name = waiting[-1].pop(0)
            order.append(name)
            start += self.sizes[name]
            if len(order) == len(self.sizes):
                return order
            waiting.append(self._candidates(start, order))
        return None

    def check_twins(self, order: Sequence[str]) -> None:
        """Raise ModelError where two parameters of one size could change places and that would change the model."""
        starts = dict(zip(order, _running_sums([self.sizes[name] for name in order]), strict=True))
        for one, other in combinations(order, 2):
            if self.sizes[one] != self.sizes[other]:
                continue
            here, there = (_ends_of(self.flat, starts[name], self.sizes[name], self.roots) for name in (one, other))
            right = _distance(here, self._ends_of_reference(one)) + _distance(there, self._ends_of_reference(other))
            wrong = _distance(here, self._ends_of_reference(other)) + _distance(there, self._ends_of_reference(one))
            if wrong <= 2 * right and here.tobytes() != there.tobytes():
                raise ModelError(
                    f"{self.flat.name}: the reference model's values cannot tell {one} from {other}, and the order of "
                    "parameters is not stored",
                    hint=_HINT,
                )

    def _candidates(self, start: int, used: Sequence[str]) -> list[str]:
        """The unused parameters that fit the values at `start`, the most alike first."""
        found: list[tuple[float, str]] = []
        first = _read(self.flat.slice(0, start, min(start + _GLANCE, self.flat.size)), self.roots)
        for name, size in self.sizes.items():
            expected = self._ends_of_reference(name)
            seen = min(size, len(first), _GLANCE)
            if name in used or start + size > self.flat.size or _distance(first[:seen], expected[:seen]) > 1:
                continue
            self.steps += 1
            distance = _distance(_ends_of(self.flat, start, size, self.roots), expected)
            if distance < _MAX_DISTANCE:
                found.append((distance, name))
        return [name for _, name in sorted(found)]

    def _ends_of_reference(self, name: str) -> Values:
        if name not in self._ends:
            tensor = self.reference.tensors[name]
            self._ends[name] = _ends_of(tensor.reshape((tensor.size,)), 0, tensor.size, self.reference.roots)
        return self._ends[name]


def _running_sums(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:count]) for count in range(len(sizes))]


def _distance(values: Values, expected: Values) -> float:
    """The relative distance of two samples, 0 for equal ones."""
    import numpy as np

    scale = float(np.linalg.norm(expected)) or 1.0
    distance = float(np.linalg.norm(values - expected)) / scale
    return distance if distance == distance else float("inf")


def _ends_of(flat: Tensor, start: int, size: int, roots: Mapping[str, Path]) -> Values:
    """The first and the last elements of `flat[start : start + size]`; all of them where they are few."""
    import numpy as np

    if size <= 2 * _SAMPLE:
        return _read(flat.slice(0, start, start + size), roots)
    head = flat.slice(0, start, start + _SAMPLE)
    tail = flat.slice(0, start + size - _SAMPLE, start + size)
    return np.concatenate([_read(head, roots), _read(tail, roots)])


def _read(tensor: Tensor, roots: Mapping[str, Path]) -> Values:
    """The elements of a small tensor in fp64, flattened; NaN where no chunk has them."""
    import numpy as np

    values = np.full(tensor.grid, np.nan)
    for chunk in tensor.chunks:
        box = tuple([slice(start, stop) for start, stop in zip(chunk.box.offsets, chunk.box.stops, strict=True)])
        values[box] = _read_chunk(chunk, roots)
    return values.reshape(-1)


def _read_chunk(chunk: Chunk, roots: Mapping[str, Path]) -> Values:
    import numpy as np

    extent, sizes = chunk.extent, chunk.box.sizes
    data = bytearray(extent.span(sizes))
    with OpenFiles(roots) as files:
        files.read_into(extent.file, extent.offset, memoryview(data))
    items = np.ndarray(sizes, extent.dtype.numpy, data, strides=extent.strides)
    return items.astype(np.float64)
