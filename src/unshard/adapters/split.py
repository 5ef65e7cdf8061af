"""A PEFT model's tensors told apart: the base model under its own names, and the adapters as PEFT's files hold them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unshard.adapters import names
from unshard.adapters.config import Completion, Shown, complete_config
from unshard.adapters.layers import Layers, find_layers
from unshard.adapters.patterns import last_component
from unshard.adapters.recorded import Recorded, read_recorded
from unshard.checkpoint import Checkpoint, Note
from unshard.errors import ModelError, UnshardError
from unshard.model import Adapter
from unshard.model_config import class_name, is_tied
from unshard.options import MergeOptions
from unshard.tensors import Tensor
from unshard.words import names_in_words

EMBEDDINGS = ("embed_tokens", "lm_head")
"""The modules whose base weights PEFT saves beside an adapter of theirs (huggingface/peft, `EMBEDDING_LAYER_NAMES`)."""


@dataclass(frozen=True, slots=True)
class Split:
    """The base model and the adapters of a checkpoint.

    base:     the base model's tensors in stored order; what lies under `modules_to_save` is its value before training.
              Empty for a checkpoint of adapters only.
    adapters: complete, unless `problems` says otherwise.
    tied:     the model ties its output to its input embedding.
    """

    base: Mapping[str, Tensor]
    adapters: tuple[Adapter, ...] = ()
    notes: tuple[Note, ...] = ()
    problems: tuple[UnshardError, ...] = ()
    tied: bool = False


@dataclass(slots=True)
class _Sorted:
    """Tensors by what their names say.

    base: base name → tensor; stored: base name → stored name. adapters: adapter's name → (file name → tensor).
    saved, tokens: adapter's name → modules that were trained whole, or in some rows.
    """

    base: dict[str, Tensor] = field(default_factory=dict)
    stored: dict[str, str] = field(default_factory=dict)
    adapters: dict[str, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    saved: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    tokens: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    problems: list[UnshardError] = field(default_factory=list)


def split(
    checkpoint: Checkpoint,
    tensors: Mapping[str, Tensor],
    options: MergeOptions,
    outline: Mapping[str, Tensor] | None = None,
) -> Split:
    """The base model and the adapters among `tensors`: the checkpoint's, without the wrappers of data parallelism.

    outline: the parameters of the base model as far as they are known, for a checkpoint that holds adapters only.

    Collects what is wrong in `Split.problems`; an adapter with problems has an incomplete config.
    """
    sorted_ = _sort(tensors)
    tied = is_tied(checkpoint.config or {})
    if not sorted_.adapters:
        notes = [Note("--lora-alpha was given, but there is no LoRA adapter", level="warning")]
        return Split(
            sorted_.base, (), tuple(notes if options.lora_alpha is not None else ()), tuple(sorted_.problems), tied
        )
    adapters: list[Adapter] = []
    notes, problems = [], list(sorted_.problems)
    filled = options.fill_from is not None
    base_is_written = (bool(sorted_.base) or filled) and not options.adapter_only
    several = len(sorted_.adapters) > 1
    for name, parts in sorted_.adapters.items():
        if tied:
            _drop_tied_tokens(parts)
        recorded = read_recorded(_recorded_for(checkpoint.adapter, name), options.lora_alpha)
        layers = find_layers(parts, sorted_.base, recorded.config)
        stays = not options.adapter_only and any(layer.weight is not None for layer in layers.layers)
        shown = _shown(layers, sorted_, name, checkpoint.config, sorted_.base or outline or {}, base_stays=stays)
        completion = complete_config(recorded, shown)
        parts |= _copies(sorted_, layers, completion.config)
        adapters.append(Adapter(name, parts, completion.config))
        notes += _notes(completion, recorded, sorted_, name, several=several, fused=options.fuse_lora, filled=filled)
        problems += [*recorded.problems, *layers.problems, *completion.problems]
        if tied and options.fuse_lora and options.tie_embeddings is None:
            problems += _tie_conflicts(layers)
    if base_is_written and not options.fuse_lora:
        notes.insert(0, _verdict(adapters))
    return Split(sorted_.base, tuple(adapters), tuple(dict.fromkeys(notes)), tuple(_once(problems)), tied)


def _sort(tensors: Mapping[str, Tensor]) -> _Sorted:
    sorted_ = _Sorted()
    foreign = names.foreign_methods(tensors)
    if foreign:
        methods = ", ".join(sorted(set(foreign.values())))
        examples = names_in_words(list(foreign))
        sorted_.problems.append(
            ModelError(
                f"the checkpoint holds an adapter of a kind that is not supported: {methods}"
                f" ({len(foreign)} tensors: {examples}); only LoRA is",
                hint="load the checkpoint in the framework that trained it, and merge the adapter with PEFT",
            )
        )
    parts = {name: names.read_part(name) for name in tensors}
    in_file_form = any(part and part.kind == "lora" and part.adapter is None for part in parts.values())
    adapted = any(part and part.kind != "copy" for part in parts.values())
    for name, tensor in tensors.items():
        part = parts[name]
        if name in foreign:
            continue
        if part is not None and adapted:
            _sort_part(sorted_, part, tensor)
        elif in_file_form:
            sorted_.adapters["default"][names.file_name(name)] = tensor
            if ".base_layer." not in name:
                sorted_.saved["default"].add(names.base_name(name).rpartition(".")[0])
        else:
            _sort_base(sorted_, name, tensor, adapted=adapted)
    return sorted_


def _sort_part(sorted_: _Sorted, part: names.Part, tensor: Tensor) -> None:
    adapter = part.adapter or "default"
    if part.kind == "copy":
        return
    if part.file in sorted_.adapters[adapter]:
        sorted_.problems.append(ModelError(f"adapter {adapter!r} has two tensors that are `{part.file}` in its file"))
    sorted_.adapters[adapter][part.file] = tensor.rename(part.file)
    if part.kind == "saved":
        sorted_.saved[adapter].add(names.base_name(part.module))
    if part.kind == "tokens":
        sorted_.tokens[adapter].add(names.base_name(part.module))


def _sort_base(sorted_: _Sorted, name: str, tensor: Tensor, *, adapted: bool) -> None:
    own = names.base_name(name) if adapted else names.strip_prefix(name)
    if own in sorted_.base:
        sorted_.problems.append(ModelError(f"`{sorted_.stored[own]}` and `{name}` are both `{own}` in the base model"))
    sorted_.base[own] = tensor.rename(own)
    sorted_.stored[own] = name


def _shown(
    layers: Layers,
    sorted_: _Sorted,
    adapter: str,
    config: Mapping[str, Any] | None,
    parameters: Mapping[str, Tensor],
    *,
    base_stays: bool,
) -> Shown:
    """What the tensors show of an adapter; `parameters` are those of the base model, as far as they are known."""
    paths = [name.split(".")[:-1] for name in parameters]
    return Shown(
        layers=layers.layers,
        saved=sorted_.saved[adapter],
        tokens=bool(sorted_.tokens[adapter]),
        modules={".".join(path[:length]) for path in paths for length in range(1, len(path) + 1)},
        weights={
            name.removesuffix(".weight")
            for name, tensor in parameters.items()
            if name.endswith(".weight") and tensor.ndim >= 2
        },
        base_stays=base_stays,
        architecture=class_name(config or {}),
    )


def _copies(sorted_: _Sorted, layers: Layers, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors of the base model that PEFT saves with an adapter: adapted embeddings, and trained biases."""
    modules = {layer.module for layer in layers.layers}
    embeddings = {module for module in modules if last_component(module) in EMBEDDINGS}
    copied: dict[str, Tensor] = {}
    for own, tensor in sorted_.base.items():
        module, _, leaf = own.rpartition(".")
        trained_bias = leaf == "bias" and (
            config.get("bias") == "all" or (config.get("bias") == "lora_only" and module in modules)
        )
        if trained_bias or (module in embeddings and not config.get("trainable_token_indices")):
            file = names.file_name(sorted_.stored[own])
            copied[file] = tensor.rename(file)
    return copied


def _drop_tied_tokens(parts: dict[str, Tensor]) -> None:
    """A tied output layer shares the trained rows of the embedding, and PEFT saves them once."""
    rows = [name for name in parts if name.endswith(names.TOKENS)]
    heads = [name for name in rows if last_component(name.removesuffix(names.TOKENS)) == "lm_head"]
    if len(rows) > len(heads):
        for name in heads:
            del parts[name]


def _recorded_for(recorded: Mapping[str, Any] | None, adapter: str) -> Mapping[str, Any] | None:
    """What is recorded of one adapter: a mapping by adapters' names is allowed, as well as one for all."""
    own = (recorded or {}).get(adapter)
    return own if isinstance(own, Mapping) and "peft_type" not in (recorded or {}) else recorded


def _tie_conflicts(layers: Layers) -> list[UnshardError]:
    """Low-rank layers on one of two tied modules: fused, the two differ."""
    adapted = {last_component(layer.module) for layer in layers.layers} & set(EMBEDDINGS)
    if len(adapted) != 1:
        return []
    return [
        ModelError(
            f"the adapter adapts {adapted.pop()} alone, but config.json ties lm_head to the embedding:"
            " fused, the two are no longer the same",
            hint="`--untie-word-embedding` keeps both, as in training; `--tie-word-embedding` keeps the embedding only",
        )
    ]


def _verdict(adapters: list[Adapter]) -> Note:
    what = "the adapter" if len(adapters) == 1 else f"the {len(adapters)} adapters"
    return Note(
        f"The base weights do not contain {what}: load them with lora_adapter/, or merge again with --fuse-lora.",
        level="warning",
    )


def _notes(
    completion: Completion,
    recorded: Recorded,
    sorted_: _Sorted,
    adapter: str,
    *,
    several: bool,
    fused: bool,
    filled: bool,
) -> list[Note]:
    label = f"adapter {adapter!r}: " if several else ""
    notes = [Note(label + note.text, note.tensors, note.level) for note in completion.notes]
    origin = completion.config.get("base_model_name_or_path")
    if filled and origin:
        notes.append(Note(f"{label}adapter_config.json calls the base model {origin}."))
    elif sorted_.base:
        called = f"adapter_config.json calls them {origin}" if origin else "which model they came from is not recorded"
        text = (
            f"The base weights are those that training froze under the adapter, as the checkpoint holds them; {called}."
        )
        notes.append(Note(text))
    if not recorded.is_config:
        told = recorded.source or "the command line"
        text = (
            f"{label}neither the tensors nor {told} tell whether training used rsLoRA, alphas per module or trained "
            "biases: taken as no."
        )
        notes.append(Note(text))
    if several and recorded.source and not recorded.alpha_is_given:
        notes.append(Note(f"{label}{recorded.source} was taken to hold for it.", level="warning"))
    saved = sorted(sorted_.saved[adapter])
    if saved and sorted_.base:
        place = "they take the place of the originals" if fused else "the base weights hold them as before training"
        text = f"{label}modules that were trained whole (modules_to_save): {place}."
        notes.append(Note(text, tuple(saved), "note" if fused else "warning"))
    return notes


def _once(problems: list[UnshardError]) -> list[UnshardError]:
    return list({problem.message: problem for problem in problems}.values())
