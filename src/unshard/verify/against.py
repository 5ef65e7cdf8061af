"""`verify OUT [--against SRC|HF_DIR]` and verl's `test`: a model checked on its own or against another.

Either side may be a Hugging Face directory or a checkpoint; a checkpoint is named as a merge would name it, so that the
two sides speak of the same tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from unshard import families
from unshard.checkpoint import Checkpoint, Note
from unshard.errors import raise_all
from unshard.formats.huggingface.reader import HuggingFace
from unshard.formats.huggingface.target import cast_values
from unshard.merging import split_adapters
from unshard.opening import open_checkpoint
from unshard.options import MergeOptions
from unshard.report.events import Sink
from unshard.tensors import Tensor
from unshard.verify.compare import Comparison, Side, Tolerance, compare
from unshard.verify.structure import ask_safetensors


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was checked: structure always; `comparison` where there was something to compare with."""

    output: str
    against: str | None
    family: str | None
    tensors: int
    size: int
    notes: tuple[Note, ...]
    comparison: Comparison | None

    @property
    def holds(self) -> bool:
        return self.comparison is None or self.comparison.holds


def verify_against(
    output: Path, against: Path | None, tolerance: Tolerance, options: MergeOptions, sink: Sink
) -> Verdict:
    """Check the structure of `output`, then compare it with `against`, if given.

    Raises an UnshardError where a side cannot be read or its structure does not hold; differences of contents are in
    the verdict.
    """
    left, family, notes = _open_side(output, options)
    comparison = None
    if against is not None:
        right, _, more = _open_side(against, options)
        notes += more
        comparison = compare(left, right, tolerance, options.settings, sink)
    size = sum(tensor.size_in_bytes for tensor in left.tensors.values())
    return Verdict(
        str(output), str(against) if against else None, family, len(left.tensors), size, tuple(notes), comparison
    )


def _open_side(path: Path, options: MergeOptions) -> tuple[Side, str | None, list[Note]]:
    if HuggingFace().detect(path) is not None:  # what is said of the checkpoint does not hold for merged models
        options = replace(options, backend=None, also=())
    checkpoint = open_checkpoint(path, options)
    raise_all(checkpoint.problems)
    if checkpoint.format == "huggingface":
        return _open_model(checkpoint, options)
    split = split_adapters(checkpoint, options)
    model = families.name_model(split.base, checkpoint.config, options, None)
    raise_all([*split.problems, *model.problems])
    values = cast_values(model.tensors, options.dtype)
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    return Side(tensors, checkpoint.roots), model.family, [*checkpoint.notes, *split.notes, *model.notes]


def _open_model(checkpoint: Checkpoint, options: MergeOptions) -> tuple[Side, str | None, list[Note]]:
    """A Hugging Face directory, under its own names; its names and shapes are checked against its config."""
    files = {chunk.extent.file for tensor in checkpoint.tensors.values() for chunk in tensor.chunks}
    for file in sorted(files, key=str):
        if file.path.endswith(".safetensors"):
            raise_all(ask_safetensors(checkpoint.roots[file.root] / file.path))
    family, notes = None, list(checkpoint.notes)
    if checkpoint.config is not None:
        model = families.name_model(checkpoint.tensors, checkpoint.config, options, None)
        raise_all(model.problems)
        family = model.family
    return Side(checkpoint.tensors, checkpoint.roots), family, notes
