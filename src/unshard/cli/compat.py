"""The command lines that users of verl's `model_merger` type, in one place.

Facts: verl-project/verl, `verl/model_merger/base_model_merger.py` and the older `scripts/legacy_model_merger.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from unshard.errors import UsageError

VERL_OPTIONS = frozenset(
    {
        "--backend",
        "--local_dir",
        "--target_dir",
        "--test_hf_dir",
        "--hf_upload_path",
        "--hf_model_path",
        "--private",
        "--use_cpu_initialization",
        "--low_cpu_mem_usage",
        "--tie-word-embedding",
        "--is-value-model",
        "--trust-remote-code",
        "--num-attention-heads",
        "--num-key-value-heads",
    }
)
"""Options that verl's users know; abbreviations that were theirs stay theirs."""

VERL_DEFAULT_TARGET = Path("tmp")
"""Where verl's merger writes when no --target_dir is given."""

NOTHING_LEFT_TO_DO = {
    "use_cpu_initialization": ("--use_cpu_initialization", "no model is built, so there is nothing to initialise"),
    "low_cpu_mem_usage": ("--low_cpu_mem_usage", "memory is always bounded, whatever the size of the model"),
    "trust_remote_code": ("--trust-remote-code", "no code is run; custom code files are copied beside the weights"),
}


def add_options(parser: argparse.ArgumentParser, *, merges: bool) -> None:
    """The options of verl's that `merge` and `test` share, and those of `merge` alone."""
    group = parser.add_argument_group("verl's words")
    add_model_words(group)
    group.add_argument("--local_dir", type=Path, metavar="DIR", help="the checkpoint: the same as SRC")
    for option, reason in NOTHING_LEFT_TO_DO.values():
        group.add_argument(option, action="store_true", help=f"accepted: {reason}")
    if merges:
        group.add_argument("--target_dir", type=Path, metavar="DIR", help="where to write: the same as OUT")
        group.add_argument(
            "--hf_upload_path", metavar="REPO", help="upload to this Hub repository, once, after verification"
        )
        group.add_argument("--private", action="store_true", help="with --hf_upload_path: make the repository private")


def add_model_words(group: argparse._ArgumentGroup) -> None:
    """What verl's users say of the model itself."""
    group.add_argument(
        "--backend", choices=["fsdp", "megatron"], help="what lies there; it is detected, and must agree if given"
    )
    group.add_argument(
        "--tie-word-embedding", action="store_true", help="drop lm_head: the embedding is used in its place"
    )
    group.add_argument("--is-value-model", action="store_true", help="the checkpoint is a critic or reward model")
    group.add_argument("--num-attention-heads", type=int, metavar="N", help="used where no config tells")
    group.add_argument("--num-key-value-heads", type=int, metavar="N", help="used where no config tells")


def idle_options(arguments: argparse.Namespace) -> list[str]:
    """A sentence for each given option that has nothing left to do."""
    return [
        f"`{option}` has nothing left to do: {reason}"
        for name, (option, reason) in NOTHING_LEFT_TO_DO.items()
        if getattr(arguments, name, False)
    ]


def choose_one(positional: Path | None, named: Path | None, words: tuple[str, str]) -> Path | None:
    """A path that may be given in two ways. Raises UsageError if both are given and differ."""
    if positional is not None and named is not None and positional != named:
        message = f"{words[0]} is `{positional}`, but `{words[1]}` says `{named}`"
        raise UsageError(message, hint="give one of them")
    return positional if positional is not None else named


def source_of(arguments: argparse.Namespace) -> Path:
    """SRC or --local_dir. Raises UsageError if neither is given."""
    source = choose_one(arguments.source, arguments.local_dir, ("SRC", "--local_dir"))
    if source is None:
        raise UsageError("no checkpoint given", hint=f"unshard {arguments.command} CHECKPOINT …")
    return source


def target_of(arguments: argparse.Namespace) -> Path:
    """OUT or --target_dir; verl's own default when the source was named in verl's way.

    `merge --local_dir A B` leaves one path for two positionals: it is the target.
    """
    target = choose_one(arguments.output, arguments.target_dir, ("OUT", "--target_dir"))
    if target is not None:
        return target
    if arguments.local_dir is not None:
        return VERL_DEFAULT_TARGET
    raise UsageError("no place to write given", hint=f"unshard {arguments.command} {arguments.source} OUT")


def share_positionals(arguments: argparse.Namespace) -> None:
    """With --local_dir, a lone positional is the target and not the source."""
    if arguments.local_dir is not None and arguments.source is not None and arguments.output is None:
        arguments.source, arguments.output = None, arguments.source
