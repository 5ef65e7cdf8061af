"""The files beside the weights that make a directory a model: configs, tokenizer, templates, code, licence."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unshard.checkpoint import Asset
from unshard.errors import FormatError
from unshard.model_files import (
    CONFIG,
    CONFIG_PATTERNS,
    GENERATION_CONFIG,
    LICENSE_PATTERNS,
    TEMPLATE_DIRECTORY,
    TOKENIZER_PATTERNS,
    matches,
)
from unshard.tensors import SourceFile

_COPIED = (*CONFIG_PATTERNS, *TOKENIZER_PATTERNS, *LICENSE_PATTERNS)
_SMALL = 16 << 20
"""Bytes. Parsed, the worst of them takes twenty-five times as much memory."""


class SideFilesError(FormatError):
    """A config.json or generation_config.json that is no JSON object. `--config DIR` replaces it."""


def find_assets(directory: Path, root_name: str) -> tuple[dict[str, Any] | None, tuple[Asset, ...]]:
    """The parsed config.json of a directory (None if there is none) and all its assets, under the root `root_name`.

    Custom code (`*.py`) belongs to the model where a config names it in an `auto_map`. Links are followed: a hub cache
    consists of them. Raises SideFilesError for a config.json or generation_config.json that is no JSON object, and
    FormatError for a link to nothing: a damaged file is never taken for an absent one.
    """
    names = [name for name in _list_files(directory) if matches(name, _COPIED)]
    try:
        config = read_config(directory / CONFIG) if CONFIG in names else None
        if GENERATION_CONFIG in names:
            read_config(directory / GENERATION_CONFIG)
    except FormatError as error:
        raise SideFilesError(error.message, hint=error.hint) from None
    if any(_names_code(directory / name) for name in names if name.endswith("config.json")):
        names += [name for name in _list_files(directory) if name.endswith(".py")]
    if (directory / TEMPLATE_DIRECTORY).is_dir():
        templates = [name for name in _list_files(directory / TEMPLATE_DIRECTORY) if name.endswith(".jinja")]
        names += [f"{TEMPLATE_DIRECTORY}/{name}" for name in templates]
    assets = [Asset(name, SourceFile(root_name, name), _size(directory / name)) for name in sorted(names)]
    return config, tuple(assets)


def is_tokenizer_file(path: str) -> bool:
    """Whether an asset belongs to the tokenizer (chat templates included) and not to the model."""
    return matches(path, TOKENIZER_PATTERNS)


def read_config(path: Path) -> dict[str, Any]:
    """A JSON object in a file. Raises FormatError that says where it is malformed."""
    try:
        content = json.loads(read_small_file(path).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: malformed JSON: {error}", hint=_MEND) from None
    if not isinstance(content, dict):
        raise FormatError(f"{path}: expected a JSON object, found a {type(content).__name__}", hint=_MEND)
    return content


def find_stray_link(directory: Path, name: str) -> Path | None:
    """What an asset really is, where it is a link to a file outside the directory; None for all others.

    The links of a hub cache, `snapshots/REVISION/NAME` to `blobs/HASH`, stay inside it.
    """
    home, target = directory.resolve(), (directory / name).resolve()
    if home in target.parents:
        return None
    blobs = home.parent.parent / "blobs"
    return None if home.parent.name == "snapshots" and target.parent == blobs else target


def list_directory(directory: Path) -> list[Path]:
    """What lies in a directory, in order of names. Raises FormatError where that cannot be seen."""
    try:
        return sorted(directory.iterdir())
    except OSError as error:
        raise FormatError(f"{directory}: cannot be read: {error.strerror}") from error


def read_small_file(path: Path, limit: int = _SMALL) -> bytes:
    """The bytes of a config or an index. Raises FormatError where it cannot be read, or is far too large to be one."""
    size = _size(path)
    if size > limit:
        raise FormatError(f"{path}: {size:,} bytes are far too many; at most {limit:,} are read")
    try:
        return path.read_bytes()
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from error


_MEND = "mend the file, or take another with --config DIR"


def _list_files(directory: Path) -> Iterator[str]:
    """Names of all that is no directory: what is no regular file either is refused, and not taken for absent."""
    for entry in list_directory(directory):
        if not entry.is_dir():
            yield entry.name


def _names_code(path: Path) -> bool:
    """Whether a config mentions custom code, in whatever state the file is."""
    return b'"auto_map"' in read_small_file(path)


def _size(path: Path) -> int:
    try:
        status = path.stat()
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise FormatError(f"{path}: not a regular file")
    return status.st_size
