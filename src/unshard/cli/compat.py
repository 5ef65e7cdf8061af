"""The command lines that users of verl's `model_merger` type, in one place.

Facts: verl-project/verl, `verl/model_merger/base_model_merger.py` and the older `scripts/legacy_model_merger.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from unshard.cli.parser import braces, count, one_of, path
from unshard.errors import UsageError
from unshard.report.events import Message
from unshard.report.printers import Printer

_SHARED = ("--backend", "--local_dir", "--tie-word-embedding", "--is-value-model", "--help")
_TODAY = (*_SHARED, "--trust-remote-code", "--use_cpu_initialization")
_LEGACY = (*_SHARED, "--hf_model_path")
_MERGE = ("--target_dir", "--hf_upload_path", "--private")
_TEST = ("--test_hf_dir",)

DIALECTS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "merge": ((*_TODAY, *_MERGE), (*_LEGACY, *_MERGE)),
    "plan": ((*_TODAY, *_MERGE), (*_LEGACY, *_MERGE)),
    "test": ((*_TODAY, *_TEST), (*_LEGACY, *_TEST)),
}
"""Command → the options of verl's parsers, the newest first: what was an abbreviation there is one here."""

BACKENDS = ("fsdp", "megatron")

DEFAULT_TARGET = Path("tmp")
"""Where verl's merger writes when no --target_dir is given."""

NOTHING_LEFT_TO_DO = {
    "use_cpu_initialization": ("--use_cpu_initialization", "no model is built, so there is nothing to initialise"),
    "low_cpu_mem_usage": ("--low_cpu_mem_usage", "memory is always bounded, whatever the size of the model"),
    "trust_remote_code": ("--trust-remote-code", "no code is run; custom code files are copied beside the weights"),
}
"""Attribute → option and reason. They are accepted, and a note says why nothing comes of them."""


def add_options(parser: argparse.ArgumentParser, *, merges: bool) -> None:
    """The options of verl's that `merge` and `test` share, and those of `merge` alone."""
    group = parser.add_argument_group("verl's words")
    add_model_words(group)
    group.add_argument("--local_dir", type=path, metavar="DIR", help="the checkpoint: the same as SRC")
    for option, reason in NOTHING_LEFT_TO_DO.values():
        group.add_argument(option, action="store_true", help=f"accepted: {reason}")
    if merges:
        group.add_argument("--target_dir", type=path, metavar="DIR", help="where to write: the same as OUT")
        group.add_argument(
            "--hf_upload_path", metavar="REPO", help="upload to this Hub repository, once, after verification"
        )
        group.add_argument("--private", action="store_true", help="with --hf_upload_path: make the repository private")


def add_model_words(group: argparse._ArgumentGroup) -> None:
    """What verl's users say of the model itself."""
    group.add_argument(
        "--backend", type=one_of(BACKENDS), metavar=braces(BACKENDS),
        help="what lies there; it is detected, and must agree if given",
    )  # fmt: skip
    group.add_argument(
        "--tie-word-embedding", action="store_true", help="drop lm_head: the embedding is used in its place"
    )
    group.add_argument("--is-value-model", action="store_true", help="the checkpoint is a critic or reward model")
    group.add_argument("--num-attention-heads", type=count, metavar="N", help="used where no config tells")
    group.add_argument("--num-key-value-heads", type=count, metavar="N", help="used where no config tells")


def tell_idle(arguments: argparse.Namespace, printer: Printer) -> None:
    """A note for each given option that has nothing left to do."""
    sentences = [
        f"`{option}` has nothing left to do: {reason}"
        for name, (option, reason) in NOTHING_LEFT_TO_DO.items()
        if getattr(arguments, name, False)
    ]
    if getattr(arguments, "private", False) and arguments.hf_upload_path is None:
        sentences.append("`--private` has nothing to do: without `--hf_upload_path` nothing is uploaded")
    for sentence in sentences:
        printer.sink(Message("note", sentence))


def choose_one(positional: Path | None, named: Path | None, words: tuple[str, str]) -> Path | None:
    """A path that may be given in two ways. Raises UsageError if both are given and differ."""
    if positional is not None and named is not None and positional != named:
        message = f"{words[0]} is `{positional}`, but `{words[1]}` says `{named}`"
        raise UsageError(message, hint="give one of them")
    return positional if positional is not None else named


def share_positionals(arguments: argparse.Namespace, second: str) -> None:
    """With --local_dir, a lone positional is the second path (`output`, `reference`) and not the source."""
    if arguments.local_dir is not None and arguments.source is not None and getattr(arguments, second) is None:
        setattr(arguments, second, arguments.source)
        arguments.source = None


def source_of(arguments: argparse.Namespace) -> Path:
    """SRC or --local_dir. Raises UsageError if neither is given."""
    source = choose_one(arguments.source, arguments.local_dir, ("SRC", "--local_dir"))
    if source is None:
        raise UsageError("SRC is missing: no checkpoint was given", hint=f"unshard {arguments.command} --help")
    return source


def read_places(arguments: argparse.Namespace, printer: Printer) -> tuple[Path, Path | None]:
    """SRC and OUT of a merge, in whatever words; notes tell which others have nothing left to do."""
    share_positionals(arguments, "output")
    places = source_of(arguments), find_target(arguments)
    tell_idle(arguments, printer)
    return places


def find_target(arguments: argparse.Namespace) -> Path | None:
    """OUT or --target_dir; verl's own default when the source was named in verl's way."""
    target = choose_one(arguments.output, arguments.target_dir, ("OUT", "--target_dir"))
    return DEFAULT_TARGET if target is None and arguments.local_dir is not None else target
