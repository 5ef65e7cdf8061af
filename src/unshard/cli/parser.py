"""The command line: one argparse parser, one small function per command that describes its arguments."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich_argparse import RawDescriptionRichHelpFormatter

from unshard.cli import compat

EPILOG = """\
exit codes:
  0 done and verified    1 unexpected trouble        2 wrong usage
  3 no checkpoint found  4 damaged or refused file   5 pieces missing or in conflict
  6 names, shapes, ties  7 cannot write the output   8 verification failed
  130 interrupted
"""
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def size(text: str) -> int:
    """A size as people write it: 5GB, 512MiB, 1000000. Decimal units are powers of ten, as transformers reads them."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?\s*", text, re.IGNORECASE)
    value = int(float(match[1]) * _UNITS[match[2].lower()]) if match and match[2].lower() in _UNITS else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is no size; write it like 5GB, 512MiB or 1000000")
    return value


def count(text: str) -> int:
    """A whole number above zero."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number above zero")
    return int(text)


class HelpFormatter(RawDescriptionRichHelpFormatter):
    """rich's help, with group titles as they are written."""

    group_name_formatter = str


class Parser(argparse.ArgumentParser):
    """argparse with verl's abbreviations, our error style, and `-` and `_` read alike in option names."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", HelpFormatter)
        super().__init__(**options)

    def error(self, message: str) -> Any:
        from unshard.errors import UsageError

        raise UsageError(message, hint=f"{self.prog} --help")

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Resolve an abbreviation; where it could mean several options, those that verl's merger had go first."""
        found: list[Any] = super()._get_option_tuples(option_string)
        verl = [match for match in found if set(match[0].option_strings) & compat.VERL_OPTIONS]
        return verl if len(verl) == 1 else found


def build_parser(commands: Sequence[tuple[str, str, Callable[[argparse.ArgumentParser], None] | None]]) -> Parser:
    """The whole parser from (name, one line of help, function that adds the arguments).

    Only the command that is wanted needs the function; the others are there to be listed.
    """
    from unshard import __version__

    parser = Parser(
        prog="unshard",
        description="Turn the checkpoint fragments of distributed training into a Hugging Face model.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"unshard {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, line, describe in commands:
        command = subparsers.add_parser(name, help=line, description=line)
        if describe is not None:
            describe(command)
            add_common_options(command)
    return parser


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """What every command understands."""
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json", action="store_true", help="print JSON lines on stdout: every event, the report, errors"
    )
    group.add_argument("-q", "--quiet", action="store_true", help="print no progress")
    group.add_argument("-v", "--verbose", action="store_true", help="say more: every tensor that a note is about")
    group.add_argument("--debug", action="store_true", help="show a traceback when something unexpected happens")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """How hard to work."""
    group = parser.add_argument_group("engine")
    group.add_argument("--jobs", type=count, metavar="N", help="threads (default: the cores, at most 4)")
    group.add_argument("--memory", type=size, metavar="SIZE", help="what all buffers may take (default: 64MiB)")


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Where the pieces lie."""
    group = parser.add_argument_group("source")
    group.add_argument(
        "--also", type=Path, action="append", default=[], metavar="DIR",
        help="a further directory with pieces of the same checkpoint (node-local disks); may be repeated",
    )  # fmt: skip
    group.add_argument(
        "--config", "--hf_model_path", type=Path, metavar="DIR",
        help="take config.json, tokenizer and other side files from DIR (--hf_model_path is verl's word)",
    )  # fmt: skip
    group.add_argument(
        "--shapes-from", type=Path, metavar="DIR",
        help="a reference model whose parameter shapes unflatten FSDP1 flat parameters",
    )  # fmt: skip


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """What should come out."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--dtype", choices=["keep", "bf16", "fp16", "fp32"], default="keep",
        help="round floating-point tensors to this type; keep (default) changes no bit",
    )  # fmt: skip
    group.add_argument(
        "--names", default="hub", metavar="hub|stored|DIR",
        help="names as save_pretrained writes them (hub, default), as stored, or exactly those of the model in DIR",
    )  # fmt: skip
    group.add_argument("--weights-only", action="store_true", help="no config: write stored names, tie nothing")
    group.add_argument(
        "--untie-word-embedding", action="store_true",
        help="keep both lm_head and embed_tokens and set tie_word_embeddings to false in config.json",
    )  # fmt: skip
    lora = parser.add_argument_group("LoRA")
    how = lora.add_mutually_exclusive_group()
    how.add_argument("--fuse-lora", action="store_true", help="add the adapter into the base weights (fp32 arithmetic)")
    how.add_argument("--adapter-only", action="store_true", help="write the PEFT adapter, without the base model")
    lora.add_argument("--lora-alpha", type=float, metavar="ALPHA", help="alpha, where the checkpoint does not say")


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """How it is written."""
    group = parser.add_argument_group("files")
    group.add_argument(
        "--format", dest="container", choices=["safetensors", "bin"], default="safetensors",
        help="model.safetensors (default) or pytorch_model.bin",
    )  # fmt: skip
    group.add_argument(
        "--max-shard-size", type=size, metavar="SIZE", help="bytes of tensors per weights file (default: 5GB)"
    )
    group.add_argument("--overwrite", action="store_true", help="replace the model that lies at the target")
    group.add_argument(
        "--verify", choices=["full", "sample", "structure"], default="full",
        help="read back all contents (default), samples of them, or the structure alone",
    )  # fmt: skip
    group.add_argument("--check-replicas", action="store_true", help="compare the bytes of all replicas before writing")
