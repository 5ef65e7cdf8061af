"""What `inspect` shows of a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unshard.checkpoint import Checkpoint
from unshard.families import derive_config
from unshard.model_config import class_name
from unshard.report.console import print_facts, print_line, print_table, print_title
from unshard.report.printers import problem_to_json
from unshard.report.render import WEIGHTS_IN_WORDS, print_notes
from unshard.report.report import note_to_json
from unshard.words import bytes_in_words, count_in_words, names_in_words

if TYPE_CHECKING:
    from rich.console import Console


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
        "encodings": dict(_encodings(checkpoint)),
        "tensors": {
            tensor.name: {"dtype": tensor.dtype.name, "shape": list(tensor.shape), "chunks": len(tensor.chunks)}
            for tensor in checkpoint.tensors.values()
        },
        "architecture": _architecture(checkpoint),
        "facts": dict(checkpoint.facts),
        "adapter": dict(checkpoint.adapter) if checkpoint.adapter else None,
        "assets": [asset.path for asset in checkpoint.assets],
        "skipped": dict(checkpoint.skipped),
        "weights": checkpoint.weights,
        "excluded": {name: list(shape) for name, shape in checkpoint.excluded.items()},
        "notes": [note_to_json(note) for note in checkpoint.notes],
        "problems": [problem_to_json(problem) for problem in checkpoint.problems],
    }


def print_catalog(console: Console, checkpoint: Checkpoint, *, tensors: bool, verbose: bool) -> None:
    """The catalog for people; with `tensors` a line for each, with `verbose` every name that a note is about."""
    print_line(console, (checkpoint.title, "bold"))
    print_facts(console, _facts(checkpoint, verbose=verbose))
    if checkpoint.notes:
        print_title(console, "Notes")
        print_notes(console, checkpoint.notes, verbose=verbose)
    if tensors:
        print_title(console, "Tensors")
        rows = [
            (tensor.name, tensor.dtype.name, str(list(tensor.shape)), count_in_words(len(tensor.chunks), "chunk"))
            for tensor in checkpoint.tensors.values()
        ]
        print_table(console, rows)
    if checkpoint.skipped and verbose:
        print_title(console, "Skipped")
        print_table(console, list(checkpoint.skipped.items()))
    if checkpoint.problems:
        print_title(console, "Problems")
        for problem in checkpoint.problems:
            print_line(console, (" x ", "bold red"), problem.message.replace("\n", "\n   "))
            if problem.hint:
                print_line(console, "   ", ("hint: ", "bold cyan"), problem.hint)


def _facts(checkpoint: Checkpoint, *, verbose: bool) -> Iterator[tuple[str, str]]:
    shown: list[Path] = []
    for name, path in checkpoint.roots.items():
        if path.absolute() not in shown:
            yield name, str(path)
            shown.append(path.absolute())
    yield "format", checkpoint.format
    if checkpoint.world_size is not None:
        mesh = " x ".join([f"{name}={size}" for name, size in checkpoint.mesh])
        yield "world", count_in_words(checkpoint.world_size, "rank") + (f", mesh {mesh}" if mesh else "")
    if checkpoint.placements:
        yield "placements", ", ".join([f"{name}: {count:,}" for name, count in checkpoint.placements.items()])
    total = sum(tensor.size * tensor.dtype.packed for tensor in checkpoint.tensors.values())
    yield "tensors", f"{len(checkpoint.tensors):,}, {total:,} elements, {bytes_in_words(checkpoint.size_in_bytes)}"
    dtypes = Counter(tensor.dtype.name for tensor in checkpoint.tensors.values())
    for encoding, count in _encodings(checkpoint).items():
        yield "compressed", f"{count_in_words(count, 'chunk')} with {encoding}"
    yield "dtypes", ", ".join([f"{name}: {count:,}" for name, count in dtypes.most_common()])
    if checkpoint.weights:
        yield "weights", WEIGHTS_IN_WORDS[checkpoint.weights]
    if checkpoint.excluded:
        names = names_in_words(list(checkpoint.excluded), len(checkpoint.excluded) if verbose else 3)
        yield "left out", f"{count_in_words(len(checkpoint.excluded), 'parameter')} at saving: {names}"
    lora = [name for name in checkpoint.tensors if "lora_" in name]
    if lora:
        yield "adapters", f"{count_in_words(len(lora), 'LoRA tensor')}; {_describe_adapter(checkpoint)}"
    if recorded := ", ".join(_recorded(checkpoint.facts)):
        yield "recorded", recorded
    yield "model", _architecture(checkpoint) or _without_config(checkpoint)
    if checkpoint.assets:
        yield "side files", ", ".join([asset.path for asset in checkpoint.assets])
    if checkpoint.skipped:
        yield "skipped", names_in_words(list(checkpoint.skipped)) + ("" if verbose else "; `--verbose` says why")


def _encodings(checkpoint: Checkpoint) -> Counter[str]:
    """How many chunks must be decoded, by their encoding."""
    files = (chunk.extent.file for tensor in checkpoint.tensors.values() for chunk in tensor.chunks)
    return Counter([file.encoded.encoding for file in files if file.encoded is not None])


def _recorded(facts: Mapping[str, Any]) -> Iterator[str]:
    """What training recorded of the architecture, as far as it tells one model from another at a glance."""
    for name, noun in (("num_layers", "layer"), ("num_attention_heads", "head"), ("num_query_groups", "key head")):
        if type(facts.get(name)) is int and (name != "num_query_groups" or facts.get("group_query_attention")):
            yield count_in_words(facts[name], noun)
    if type(facts.get("hidden_size")) is int:
        yield f"hidden size {facts['hidden_size']:,}"
    if type(facts.get("num_experts")) is int:
        yield count_in_words(facts["num_experts"], "expert")
    padded, vocabulary = facts.get("padded_vocab_size"), facts.get("vocab_size")
    if type(padded) is int:
        known = type(vocabulary) is int and vocabulary != padded
        yield f"vocabulary {vocabulary:,} padded to {padded:,}" if known else f"vocabulary {padded:,}"
    if facts.get("untie_embeddings_and_output_weights") is False:
        yield "tied embeddings"


def _without_config(checkpoint: Checkpoint) -> str:
    """What becomes of a checkpoint that has no config.json."""
    derived = derive_config(checkpoint.facts, checkpoint.tensors) if checkpoint.dialect == "megatron" else None
    if derived is not None and derived.config is not None and not checkpoint.problems:
        return f"no config.json; {class_name(derived.config)} follows from what training recorded"
    return "no config.json: a merge needs `--config DIR` or `--weights-only`"


def _architecture(checkpoint: Checkpoint) -> str | None:
    """What config.json calls the model's class, or else its type."""
    config = checkpoint.config or {}
    classes = config.get("architectures")
    names = [str(name) for name in classes] if isinstance(classes, list) else []
    return ", ".join(names) or (str(config["model_type"]) if config.get("model_type") else None)


def _describe_adapter(checkpoint: Checkpoint) -> str:
    recorded = checkpoint.adapter or {}
    facts = [f"{key} {recorded[key]}" for key in ("r", "lora_alpha") if recorded.get(key)]
    return ", ".join(facts) + " recorded" if facts else "alpha is not recorded: a merge needs `--lora-alpha N`"
