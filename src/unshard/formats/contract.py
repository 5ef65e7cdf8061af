"""What every format offers. One module (or folder) per layout on disk, registered in `formats/__init__.py`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from unshard.checkpoint import Checkpoint, Shape
from unshard.options import Weights

KnownShapes: TypeAlias = Callable[[Mapping[str, Any] | None], Mapping[str, Shape] | None]
"""From a config, the shapes of the model's parameters under their stored names in definition order; None if unknown."""

NamedShapes: TypeAlias = Callable[[Mapping[str, Any] | None, Collection[str]], Mapping[str, Shape] | None]
"""From a config and the names that are stored, the shapes of the parameters under these names, whether they are those
of the running model or of its file. Parameters that are not among them have names of their own. None if unknown."""


@dataclass(frozen=True, slots=True)
class Source:
    """The place that a format is asked about.

    path:         a directory, or a file for formats that consist of one.
    also:         further roots that hold pieces of the same checkpoint (node-local disks).
    known_shapes: answers what shapes a model's parameters have, for layouts that do not store them.
    reference:    a model with the same parameters and similar values. Where it is given, the order of `known_shapes`
                  means nothing (safetensors files are sorted by name), and the reference's values must tell it.
    axes:         pattern of a tensor's name (a regular expression for the whole of it) → the axis along which its
                  shards lie on tensor-parallel ranks, None where each has a replica: for layouts that do not store it.
    told:         what a person said of training, under Megatron-LM's argument names (`tensor_model_parallel_size`,
                  `num_attention_heads`): it stands in for what the checkpoint does not record.
    weights:      which of two copies of the parameters is meant, where a checkpoint has both ("master" or "model").
    model_key:    where in a training state the model lies ("app.model"), where there are several; None: it is found.
    named_shapes: answers what shapes the parameters have under the names of a checkpoint, for layouts that store names
                  and no whole shapes.
    repair_index: take tensors from the files of a model as they are, where the index says otherwise.
    """

    path: Path
    also: tuple[Path, ...] = ()
    known_shapes: KnownShapes = field(default=lambda _config: None)
    reference: Checkpoint | None = None
    axes: Mapping[str, int | None] = field(default_factory=dict)
    told: Mapping[str, int] = field(default_factory=dict)
    weights: Weights = "master"
    model_key: str | None = None
    named_shapes: NamedShapes = field(default=lambda _config, _names: None)
    repair_index: bool = False

    @property
    def roots(self) -> Mapping[str, Path]:
        """Root names for extents: `source` for the path itself (its parent, if it is a file), `also1`, `also2`, …"""
        first = self.path if self.path.is_dir() else self.path.parent
        return {"source": first} | {f"also{number}": path for number, path in enumerate(self.also, 1)}

    def add_told(self, recorded: Mapping[str, Any]) -> dict[str, Any]:
        """What was recorded, and what was told where nothing was."""
        told = {name: value for name, value in self.told.items() if recorded.get(name) is None}
        return {**recorded, **told}


class Format(Protocol):
    """A layout on disk. `detect` looks at names only (and small files); `read` builds the whole catalog.

    `read` collects what is wrong in `Checkpoint.problems` instead of raising at the first; it raises FormatError only
    where nothing can be said at all.
    """

    name: str
    backends: Sequence[str]

    def detect(self, path: Path) -> str | None:
        """A few words on what lies at exactly this path ("4 FSDP ranks"), or None if it is not this format's."""
        ...

    def read(self, source: Source) -> Checkpoint:
        """The catalog of the checkpoint at `source.path`."""
        ...
