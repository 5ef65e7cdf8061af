"""What lies around training checkpoints: the model's config and tokenizer, and what is known of its LoRA adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unshard.checkpoint import Asset
from unshard.errors import FormatError, UnshardError
from unshard.formats.huggingface.assets import find_assets, is_tokenizer_file, list_directory, read_config
from unshard.model_files import ADAPTER_CONFIG, ADAPTER_DIRECTORY, CONFIG

_ROOT = "assets"
_TOKENIZER_ROOT = "tokenizer"
_HUGGINGFACE = "huggingface"
_ADAPTER_FILES = (
    ADAPTER_CONFIG,
    f"{_HUGGINGFACE}/{ADAPTER_CONFIG}",
    f"{ADAPTER_DIRECTORY}/{ADAPTER_CONFIG}",
    "lora_train_meta.json",
)
"""Where facts of an adapter lie, the fullest first: PEFT's own file, also where verl saves it, then verl's few."""
_ADAPTER_FACTS = ("r", "lora_alpha", "task_type")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Files around a checkpoint.

    config, assets: of the model; `roots` holds the place that the assets' files are relative to.
    adapter:        a PEFT `adapter_config.json` or verl's `lora_train_meta.json`, parsed.
    problems:       files that are there but malformed.
    """

    config: Mapping[str, Any] | None = None
    assets: tuple[Asset, ...] = ()
    roots: Mapping[str, Path] | None = None
    adapter: Mapping[str, Any] | None = None
    problems: tuple[UnshardError, ...] = ()


def look_around(directories: Sequence[Path], parents: int = 0) -> Surroundings:
    """What lies in these directories, in their `huggingface/` (verl), and in so many parents of the first of them.

    The first place with the config of a model wins; parents count only with such a config (accelerate keeps it beside
    or above its ranks). Without any, what lies in `huggingface/` or in the first directory is taken. Facts of an
    adapter may lie one level above (Trainer saves them beside accelerate's directory of the model).
    """
    problems: list[UnshardError] = []
    places = [place for directory in directories for place in (directory / _HUGGINGFACE, directory) if place.is_dir()]
    above = list(directories[0].absolute().parents)[:parents] if directories else []
    config: Mapping[str, Any] | None = None
    assets: tuple[Asset, ...] = ()
    roots: Mapping[str, Path] | None = None
    for place in [place for place in (*places, *above) if _has_model_config(place)] or places[:1]:
        try:
            config, assets = find_assets(place, _ROOT)
            roots = {_ROOT: place}
        except FormatError as error:
            problems.append(error)
        break
    adapter = read_adapter_facts([*directories, *above[:1]], problems)
    return Surroundings(config, assets, roots, adapter, tuple(problems))


def add_tokenizer(found: Surroundings, places: Sequence[Path]) -> Surroundings:
    """`found` with the tokenizer of the first of these places that has one, where no tokenizer is among its assets."""
    if any(is_tokenizer_file(asset.path) for asset in found.assets):
        return found
    for place in places:
        try:
            _, beside = find_assets(place, _TOKENIZER_ROOT) if _has_tokenizer(place) else (None, ())
        except FormatError as error:
            return replace(found, problems=(*found.problems, error))
        tokenizer = [asset for asset in beside if is_tokenizer_file(asset.path)]
        if tokenizer:
            assets = tuple(sorted([*found.assets, *tokenizer], key=lambda asset: asset.path))
            return replace(found, assets=assets, roots={**(found.roots or {}), _TOKENIZER_ROOT: place})
    return found


def read_adapter_facts(directories: Sequence[Path], problems: list[UnshardError]) -> dict[str, Any] | None:
    """What the first file with facts of an adapter says; a later one where it is silent, or alpha is 0."""
    facts: dict[str, Any] | None = None
    for path in [directory / name for directory in directories for name in _ADAPTER_FILES]:
        found = read_first_json([path], problems)
        if facts is None:
            facts = found
        elif found:
            facts |= {key: found[key] for key in _ADAPTER_FACTS if not facts.get(key) and found.get(key)}
    return facts


def read_first_json(paths: Sequence[Path], problems: list[UnshardError]) -> dict[str, Any] | None:
    """The first of these JSON files that exists; what is wrong with it is added to `problems`."""
    for path in paths:
        if path.is_file():
            try:
                return read_config(path)
            except FormatError as error:
                problems.append(error)
    return None


def _has_model_config(directory: Path) -> bool:
    """Whether a directory has a model's config.json; a malformed one counts, a trainer's own does not."""
    if not (directory / CONFIG).is_file():
        return False
    try:
        config = read_config(directory / CONFIG)
    except FormatError:
        return True
    return "model_type" in config or "architectures" in config


def _has_tokenizer(directory: Path) -> bool:
    try:
        return directory.is_dir() and any(is_tokenizer_file(entry.name) for entry in list_directory(directory))
    except FormatError:
        return False
