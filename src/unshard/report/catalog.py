"""What `inspect` shows of a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from unshard.checkpoint import Checkpoint
from unshard.report.render import plain_console, print_facts, print_notes
from unshard.report.report import note_to_json
from unshard.report.words import bytes_in_words, count_in_words, names_in_words


def catalog_to_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """The catalog as JSON values; `chunks` counts pieces, replicas included."""
    return {
        "format": checkpoint.format,
        "title": checkpoint.title,
        "roots": {name: str(path) for name, path in checkpoint.roots.items()},
        "world_size": checkpoint.world_size,
        "mesh": [{"name": name, "size": size} for name, size in checkpoint.mesh],
        "placements": dict(checkpoint.placements),
        "bytes": checkpoint.size_in_bytes,
        "tensors": {
            tensor.name: {"dtype": tensor.dtype.name, "shape": list(tensor.shape), "chunks": len(tensor.chunks)}
            for tensor in checkpoint.tensors.values()
        },
        "adapter": dict(checkpoint.adapter) if checkpoint.adapter else None,
        "assets": [asset.path for asset in checkpoint.assets],
        "skipped": dict(checkpoint.skipped),
        "notes": [note_to_json(note) for note in checkpoint.notes],
        "problems": [
            {"code": problem.code, "message": problem.message, "hint": problem.hint} for problem in checkpoint.problems
        ],
    }


def print_catalog(checkpoint: Checkpoint, *, tensors: bool) -> None:
    """The catalog for people; with `tensors` a line for each."""
    from rich.text import Text

    console = plain_console()
    console.print(Text(checkpoint.title, style="bold"))
    print_facts(console, _facts(checkpoint))
    if checkpoint.notes:
        console.print(Text("\nNotes", style="bold"))
        print_notes(console, checkpoint.notes, verbose=tensors)
    if tensors:
        console.print(Text("\nTensors", style="bold"))
        for tensor in checkpoint.tensors.values():
            pieces = count_in_words(len(tensor.chunks), "chunk")
            console.print(Text(f"  {tensor.name}  {tensor.dtype} {list(tensor.shape)}  {pieces}"))
    if checkpoint.problems:
        console.print(Text(f"\n{count_in_words(len(checkpoint.problems), 'problem')}", style="bold red"))
        for problem in checkpoint.problems:
            console.print(Text(f" x {problem.message}"))
            if problem.hint:
                console.print(Text(f"   hint: {problem.hint}", style="cyan"))


def _facts(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    for name, path in checkpoint.roots.items():
        yield name, str(path)
    yield "format", checkpoint.format
    if checkpoint.world_size is not None:
        mesh = " x ".join([f"{name}={size}" for name, size in checkpoint.mesh])
        yield "world", count_in_words(checkpoint.world_size, "rank") + (f", mesh {mesh}" if mesh else "")
    if checkpoint.placements:
        yield "placements", ", ".join([f"{name}: {count}" for name, count in checkpoint.placements.items()])
    total = sum(tensor.size for tensor in checkpoint.tensors.values())
    yield "tensors", f"{len(checkpoint.tensors):,}, {total:,} elements, {bytes_in_words(checkpoint.size_in_bytes)}"
    dtypes = Counter(tensor.dtype.name for tensor in checkpoint.tensors.values())
    yield "dtypes", ", ".join([f"{name}: {count}" for name, count in dtypes.most_common()])
    lora = [name for name in checkpoint.tensors if "lora_" in name]
    if lora:
        yield "adapters", f"{count_in_words(len(lora), 'LoRA tensor')} ({names_in_words(lora, 1)})"
    config = checkpoint.config or {}
    architecture = ", ".join(config.get("architectures") or []) or config.get("model_type")
    yield "model", str(architecture) if architecture else "no config.json: a merge needs `--config DIR`"
    if checkpoint.assets:
        yield "side files", ", ".join([asset.path for asset in checkpoint.assets])
    if checkpoint.skipped:
        yield "skipped", names_in_words(list(checkpoint.skipped))
