"""From a path that a person typed to a catalog."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from unshard.checkpoint import Asset, Checkpoint, Note
from unshard.collector import collector_paused
from unshard.errors import IncompleteError, UnshardError, UsageError, command_line, raise_all
from unshard.formats.contract import Format, Source
from unshard.formats.huggingface.assets import SideFilesError, find_assets, is_tokenizer_file, read_config
from unshard.formats.huggingface.reader import HuggingFace
from unshard.formats.surroundings import read_adapter_facts
from unshard.locate import explain, locate
from unshard.model_config import sizes_for_ranks
from unshard.model_files import CONFIG
from unshard.options import MergeOptions
from unshard.parallel import ARGUMENTS
from unshard.shapes import ShapeTeller
from unshard.tensors import SourceFile

CONFIG_ROOT = "config"
"""The root name of the files that `--config` brings."""
TOKENIZER_ROOT = "tokenizer"
"""The same for `--tokenizer`."""


@collector_paused()
def open_checkpoint(path: Path, options: MergeOptions | None = None) -> Checkpoint:
    """The catalog of the checkpoint at or below `path`.

    Of the options, those that say where pieces lie and how they were made matter here. Raises NotACheckpointError where
    nothing readable lies, UsageError where `backend` names something else than what lies there, FormatError where files
    are damaged beyond reading; what is missing or contradictory is in `Checkpoint.problems`.
    """
    options = options or MergeOptions()
    found, place = locate(path, options.also)
    _refuse_words_for_others(found, place, options)
    reference = open_reference(options.shapes_from, options) if options.shapes_from else None
    config = _given_config(options.config)
    shapes = ShapeTeller(reference, config)
    source = Source(
        place,
        also=options.also,
        known_shapes=shapes,
        named_shapes=shapes.by_names,
        reference=shapes.unordered,
        axes=_given_axes(options.map),
        told=told_facts(options, config),
        weights=options.weights or "master",
        model_key=options.model_key,
        repair_index=options.repair_index,
    )
    checkpoint = found.read(source)
    problems = (*checkpoint.problems, *_contradictions(checkpoint, options))
    checkpoint = replace(checkpoint, notes=(*checkpoint.notes, *shapes.notes), problems=problems)
    if place.resolve() != path.resolve():
        checkpoint = replace(checkpoint, notes=(Note(explain(path, place)), *checkpoint.notes))
    if options.config:
        checkpoint = _with_config(checkpoint, options.config)
    return _with_tokenizer(checkpoint, options.tokenizer) if options.tokenizer else checkpoint


def _refuse_words_for_others(found: Format, place: Path, options: MergeOptions) -> None:
    """Raise UsageError for an option that speaks of another format than the one that was found."""
    others: tuple[str, str] | None = None
    if options.backend and options.backend not in found.backends:
        others = f"`--backend {options.backend}` was given", "leave `--backend` out: the format is detected"
    elif options.parallel and "megatron" not in found.backends:
        others = "`--parallel` tells how Megatron's ranks lie", "leave `--parallel` out"
    elif options.model_key and found.name not in ("dcp", "hf_shards"):
        others = "`--model-key` chooses among the models of a torch DCP directory", "leave `--model-key` out"
    if others is not None:
        lies = found.detect(place) or found.name
        raise UsageError(f"{others[0]}, but `{place}` holds {lies}", hint=others[1])


def told_facts(options: MergeOptions, config: Mapping[str, Any] | None = None) -> dict[str, int]:
    """What the user says of training, under Megatron-LM's argument names; of `config`, what ranks may leave open."""
    told = sizes_for_ranks(config) | {ARGUMENTS[kind]: size for kind, size in options.parallel.items()}
    if options.attention_heads is not None:
        told["num_attention_heads"] = options.attention_heads
    if options.key_value_heads is not None:
        told |= {"num_query_groups": options.key_value_heads, "group_query_attention": True}
    return told


def _contradictions(checkpoint: Checkpoint, options: MergeOptions) -> Iterator[UnshardError]:
    """A problem for each thing that the user says and training recorded otherwise."""
    words = {
        name: f"--parallel {kind}={options.parallel[kind]}"
        for kind, name in ARGUMENTS.items()
        if kind in options.parallel
    }
    words |= {"num_attention_heads": f"--num-attention-heads {options.attention_heads}"}
    words |= {"num_query_groups": f"--num-key-value-heads {options.key_value_heads}"}
    for name, told in told_facts(options).items():
        recorded = checkpoint.facts.get(name)
        if name in words and type(recorded) is int and recorded != told:
            yield UsageError(
                f"`{words[name]}` contradicts what training recorded: {name} is {recorded}",
                hint=f"leave `{words[name].partition(' ')[0]}` out: the checkpoint tells",
            )
    if options.weights is None or checkpoint.problems or checkpoint.weights == options.weights:
        return
    if checkpoint.weights is None:
        yield UsageError(
            f"`--weights {options.weights}` chooses between two copies of the parameters, but this checkpoint "
            f"({checkpoint.title}) keeps its parameters once",
            hint="leave `--weights` out",
        )
    else:
        yield IncompleteError(
            f"`--weights {options.weights}` asks for a copy of the parameters that does not lie here",
            hint=f"fetch the files that hold it, or take what lies here: --weights {checkpoint.weights}",
        )


def _given_axes(file: Path | None) -> Mapping[str, int | None]:
    """How tensors that no table knows lie on tensor-parallel ranks, as `--map` says."""
    if file is None:
        return {}
    from unshard.mapping import read_map  # late: it brings the families with it

    return read_map(file).axes


def _given_config(place: Path | None) -> Mapping[str, Any] | None:
    """The config that `--config` brings; None where it brings none, which is said later."""
    file = place / CONFIG if place is not None and place.is_dir() else place
    return read_config(file) if file is not None and file.is_file() else None


def open_reference(path: Path, options: MergeOptions) -> Checkpoint:
    """The Hugging Face directory of a reference model. Raises UsageError where there is none, and all that is wrong.

    Its index is repaired where the options say so. What is wrong is told with the directory, for the checkpoint has
    files of the same names.
    """
    reader = HuggingFace()
    if reader.detect(path) is None:
        raise UsageError(
            f"`{path}` is no Hugging Face model directory: neither safetensors nor pytorch_model.bin lies there",
            hint=command_line("ls", path),
        )
    reference = reader.read(Source(path, repair_index=options.repair_index))
    raise_all([type(problem)(f"`{path}`: {problem.message}", hint=problem.hint) for problem in reference.problems])
    return reference


def _with_config(checkpoint: Checkpoint, place: Path) -> Checkpoint:
    """The checkpoint with what `--config` brings instead of its own.

    A directory brings config.json, all side files, and what it knows of adapters, whatever is wrong with the
    checkpoint's own config; but where the checkpoint has a tokenizer and no config, as NeMo-RL's have, its own
    tokenizer stays. A file, whatever its name, is config.json; all else stays.
    """
    if not place.is_dir():
        return _with_config_file(checkpoint, place)
    config, assets = find_assets(place, CONFIG_ROOT)
    if config is None:
        raise UsageError(f"`--config {place}`: no config.json lies there", hint=command_line("ls", place))
    problems = [problem for problem in checkpoint.problems if not isinstance(problem, SideFilesError)]
    adapter = read_adapter_facts([place], problems) or checkpoint.adapter
    notes = [Note(f"config and side files come from `{place}`")]
    own = [asset for asset in checkpoint.assets if is_tokenizer_file(asset.path)] if checkpoint.config is None else []
    if own:
        assets = (*[asset for asset in assets if not is_tokenizer_file(asset.path)], *own)
        notes.append(Note(f"the tokenizer is the checkpoint's own, not that of `{place}`"))
    return replace(
        checkpoint,
        config=config,
        adapter=adapter,
        problems=tuple(problems),
        assets=assets,
        roots={**checkpoint.roots, CONFIG_ROOT: place},
        notes=(*checkpoint.notes, *notes),
    )


def _with_tokenizer(checkpoint: Checkpoint, place: Path) -> Checkpoint:
    """The checkpoint with the tokenizer of another directory, and no file of its own one."""
    files = find_assets(place, TOKENIZER_ROOT)[1] if place.is_dir() else ()
    tokenizer = [asset for asset in files if is_tokenizer_file(asset.path)]
    if not tokenizer:
        raise UsageError(f"`--tokenizer {place}`: no tokenizer lies there", hint=command_line("ls", place))
    others = [asset for asset in checkpoint.assets if not is_tokenizer_file(asset.path)]
    return replace(
        checkpoint,
        assets=(*others, *tokenizer),
        roots={**checkpoint.roots, TOKENIZER_ROOT: place},
        notes=(*checkpoint.notes, Note(f"the tokenizer comes from `{place}`")),
    )


def _with_config_file(checkpoint: Checkpoint, place: Path) -> Checkpoint:
    if not place.is_file():
        raise UsageError(f"`--config {place}`: no such directory or file", hint=command_line("ls", place.parent))
    own = Asset(CONFIG, SourceFile(CONFIG_ROOT, place.name), place.stat().st_size)
    return replace(
        checkpoint,
        config=read_config(place),
        assets=(own, *[asset for asset in checkpoint.assets if asset.path != CONFIG]),
        roots={**checkpoint.roots, CONFIG_ROOT: place.parent},
        notes=(*checkpoint.notes, Note(f"config.json is `{place}`")),
    )
