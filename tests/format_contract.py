"""What every format promises, whichever it is: the suite that a new one must pass."""

from __future__ import annotations

import shutil
from pathlib import Path

from unshard.checkpoint import Checkpoint
from unshard.errors import UnshardError
from unshard.formats.contract import Format, KnownShapes, Source
from unshard.plan.coverage import prove_coverage
from unshard.tensors import Chunk


def check_format(format: Format, place: Path, scratch: Path, known_shapes: KnownShapes = lambda _config: None) -> None:
    """Detection by names, a whole catalog whose every byte exists, and no silence about a file cut short."""
    _check_detection(format, place, scratch / "empty")
    checkpoint = format.read(Source(place, known_shapes=known_shapes))
    assert checkpoint.problems == ()
    assert checkpoint.format == format.name
    assert checkpoint.title
    assert checkpoint.tensors
    for name, tensor in checkpoint.tensors.items():
        assert tensor.name == name
        assert prove_coverage(tensor) == []
        for chunk in tensor.chunks:
            _check_extent(chunk, checkpoint)
    for asset in checkpoint.assets:
        assert (checkpoint.roots[asset.file.root] / asset.file.path).stat().st_size == asset.size
    _check_damage(format, place, checkpoint, scratch, known_shapes)


def _check_detection(format: Format, place: Path, empty: Path) -> None:
    words = format.detect(place)
    assert words
    assert "\n" not in words
    empty.mkdir()
    assert format.detect(empty) is None


def _check_extent(chunk: Chunk, checkpoint: Checkpoint) -> None:
    extent = chunk.extent
    assert not Path(extent.file.path).is_absolute()
    file = checkpoint.roots[extent.file.root] / extent.file.path
    reach = sum((size - 1) * stride for size, stride in zip(chunk.box.sizes, extent.strides, strict=True))
    assert min(extent.strides, default=0) >= 0
    assert chunk.box.volume == 0 or 0 <= extent.offset <= file.stat().st_size - reach - extent.dtype.itemsize


def _check_damage(
    format: Format, place: Path, checkpoint: Checkpoint, scratch: Path, known_shapes: KnownShapes
) -> None:
    """A file that ends early, before a tensor's bytes, is named: by an error, or among the problems."""
    chunks = [chunk for tensor in checkpoint.tensors.values() for chunk in tensor.chunks if chunk.box.volume]
    extent = chunks[0].extent
    copy = scratch / "damaged" / place.name
    if place.is_dir():
        shutil.copytree(place, copy)
    else:
        copy.parent.mkdir()
        shutil.copyfile(place, copy)
    damaged = (copy if place.is_dir() else copy.parent) / extent.file.path
    damaged.write_bytes(damaged.read_bytes()[: min(damaged.stat().st_size // 2, extent.offset)])
    try:
        problems = format.read(Source(copy, known_shapes=known_shapes)).problems
    except UnshardError as error:
        problems = (error,)
    assert any(damaged.name in str(problem) for problem in problems), problems
