"""The command line: one argparse parser, and the groups of options that commands share."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, NoReturn

from rich_argparse import RawDescriptionRichHelpFormatter

from unshard.errors import UsageError
from unshard.options import CONTAINERS, DTYPE_CHOICES, VERIFY_MODES, WEIGHTS_CHOICES
from unshard.parallel import ARGUMENTS, read_sizes
from unshard.report.console import make_console
from unshard.report.printers import write_out

EPILOG = """\
exit codes:
    0  done and verified            6  names, shapes or ties do not fit the model
    1  the system refused           7  the output cannot be written
    2  wrong usage                  8  verification failed, or the models differ
    3  no checkpoint found         70  a bug in unshard
    4  damaged or refused file    130  interrupted (143: terminated)
    5  pieces missing or          141  stdout was closed
       in conflict
"""
MOST_JOBS = 256
_USUAL_WIDTH = 80
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_DTYPE_SYNONYMS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}


def path(text: str) -> Path:
    """A path; `~` is the home directory also in `--option=~/place`, where shells leave it alone."""
    if not text:
        raise argparse.ArgumentTypeError("an empty path; is a variable of the shell not set?")
    return Path(text).expanduser() if text.startswith("~") else Path(text)


def size(text: str) -> int:
    """A size as people write it: 5GB, 512MiB, 1000000. Decimal units are powers of ten, as transformers reads them."""
    from fractions import Fraction

    match = re.fullmatch(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([kmgt]?i?)b?\s*", text, re.IGNORECASE)
    value = int(Fraction(match[1]) * _UNITS[match[2].lower()]) if match and match[2].lower() in _UNITS else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is no size; write it like 5GB, 512MiB or 1000000")
    return value


def parallel(text: str) -> dict[str, int]:
    """Sizes of Megatron's parallelism: tp=2,pp=2."""
    try:
        return read_sizes(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(error.message) from None


def count(text: str) -> int:
    """A whole number above zero."""
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number above zero")
    return int(text)


def jobs(text: str) -> int:
    """A number of threads."""
    number = count(text)
    if number > MOST_JOBS:
        raise argparse.ArgumentTypeError(f"{text} threads are more than {MOST_JOBS}, the most there can be")
    return number


def number(text: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{text}` is no number") from None
    if not isfinite(value):
        raise argparse.ArgumentTypeError(f"`{text}` is not a finite number")
    return value


def positive(text: str) -> float:
    """A finite number, zero or above."""
    value = number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"`{text}` is below zero")
    return value


def one_of(choices: Sequence[str], synonyms: dict[str, str] | None = None) -> Callable[[str], str]:
    """One of some words."""

    def parse(text: str) -> str:
        chosen = (synonyms or {}).get(text, text)
        if chosen not in choices:
            raise argparse.ArgumentTypeError(f"`{text}` is none of {', '.join(choices)}")
        return chosen

    return parse


def braces(choices: Sequence[str]) -> str:
    """How a usage line shows a choice: {a,b}."""
    return "{" + ",".join(choices) + "}"


class HelpFormatter(RawDescriptionRichHelpFormatter):
    """rich's help, with group titles as they are written, no markup in texts, and no styles where none are wanted."""

    group_name_formatter = str
    help_markup = False
    text_markup = False

    def __init__(self, prog: str, **options: Any) -> None:
        columns = get_terminal_size().columns or _USUAL_WIDTH  # some terminals say that they have none
        super().__init__(prog, **{"width": columns - 2, **options})
        self.console = make_console(sys.stdout)


class Parser(argparse.ArgumentParser):
    """argparse with our errors. Abbreviations are spelled out before it sees them (`cli.spelling`)."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", HelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError, in our words where argparse's are known."""
        missing = re.fullmatch(r"the following arguments are required: (.+)", message)
        option = re.fullmatch(r"argument ([^:]+): (.+)", message, re.DOTALL)
        if missing:
            message = f"{missing[1]} is missing"
        elif option:
            message = f"`{option[1]}`: {option[2]}"
        raise UsageError(message, hint=f"{self.prog} --help")

    @property
    def spellings(self) -> Mapping[str, argparse.Action]:
        """Every option string, with its action."""
        return self._option_string_actions

    def print_help(self, file: Any = None) -> None:
        """Print the help on stdout, for `--help` and for nothing else."""
        write_out(lambda: super(Parser, self).print_help(file), sys.stdout)

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse words that were spelled out. Raises UsageError for those that mean nothing."""
        found, unknown = self.parse_known_args(words)
        if unknown:
            self.error(f"`{self.prog}` does not take {', '.join([f'`{word}`' for word in unknown])}")
        return found


def build_parser(command: str, line: str, describe: Callable[[argparse.ArgumentParser], None]) -> Parser:
    """The parser of one command. `line` says in one line what it does, `describe` adds its arguments."""
    parser = Parser(prog=f"unshard {command}", description=line, epilog=EPILOG)
    describe(parser)
    add_common_options(parser)
    return parser


def build_overview(commands: Sequence[tuple[str, str]]) -> Parser:
    """The parser of `unshard` itself: the commands, each with its line, and the common options."""
    parser = Parser(
        prog="unshard",
        usage="unshard [-h] [--version] COMMAND ...",
        description="Turn the checkpoint fragments of distributed training into a Hugging Face model.",
        epilog=f"`unshard COMMAND --help` tells the options of a command.\n\n{EPILOG}",
    )
    group = parser.add_argument_group("commands")
    for name, line in commands:
        group.add_argument(name, help=line, nargs="?")
    parser.add_argument("--version", action="store_true", help="print the version")
    add_common_options(parser)
    return parser


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """What every command understands."""
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json", action="store_true", help="print JSON lines on stdout: every event, the result, errors"
    )
    group.add_argument("-q", "--quiet", action="store_true", help="on stderr warnings and errors only")
    group.add_argument("-v", "--verbose", action="store_true", help="say more: every tensor that a note is about")
    group.add_argument("--debug", action="store_true", help="show where in the code an error comes from")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """How hard to work."""
    group = parser.add_argument_group("engine")
    group.add_argument("--jobs", type=jobs, metavar="N", help="threads (default: the cores, at most 4)")
    group.add_argument("--memory", type=size, metavar="SIZE", help="what all buffers may take (default: 64MiB)")


def add_merge_options(parser: argparse.ArgumentParser, output: str) -> None:
    """SRC, OUT (`output` says what for) and every option of ours that a merge has."""
    parser.add_argument("source", nargs="?", type=path, metavar="SRC", help="a checkpoint, or a run that holds one")
    parser.add_argument("output", nargs="?", type=path, metavar="OUT", help=output)
    add_source_options(parser)
    add_model_options(parser)
    add_output_options(parser)
    add_engine_options(parser)


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Where the pieces lie."""
    group = parser.add_argument_group("source")
    group.add_argument(
        "--also", type=path, action="append", default=[], metavar="DIR",
        help="a further directory with pieces of the same checkpoint (node-local disks); may be repeated",
    )  # fmt: skip
    group.add_argument(
        "--config", "--hf_model_path", type=path, metavar="DIR",
        help="take config.json, tokenizer and other side files from DIR, or a file as config.json "
        "(--hf_model_path is verl's word)",
    )  # fmt: skip
    group.add_argument(
        "--tokenizer", type=path, metavar="DIR", help="take the tokenizer from DIR, and all else from where it lies"
    )
    group.add_argument(
        "--map", type=path, metavar="FILE",
        help="rules of one's own (TOML) for tensors that no family knows, and for shards that no table knows",
    )  # fmt: skip
    group.add_argument(
        "--shapes-from", type=path, metavar="DIR",
        help="a reference model, for shapes that are not stored (FSDP1 flat parameters, torch's safetensors shards)",
    )  # fmt: skip
    group.add_argument(
        "--repair-index", action="store_true",
        help="of a Hugging Face model whose index is wrong, take the tensors from the files as they are",
    )  # fmt: skip
    group.add_argument(
        "--model-key", metavar="KEY",
        help="the model among those of a torch DCP directory, by its place in the training state (model, app.ema)",
    )  # fmt: skip
    group.add_argument(
        "--weights", type=one_of(WEIGHTS_CHOICES), metavar=braces(WEIGHTS_CHOICES),
        help="of a checkpoint that keeps parameters twice (DeepSpeed) the optimizer's fp32 masters (default), or the "
        "low-precision weights of the model",
    )  # fmt: skip
    group.add_argument(
        "--parallel", type=parallel, default={}, metavar="tp=N,…",
        help=f"sizes of Megatron's parallelism ({', '.join(ARGUMENTS)}), where neither args nor names tell",
    )  # fmt: skip


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """What should come out."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--dtype", type=one_of(DTYPE_CHOICES, _DTYPE_SYNONYMS), default="keep", metavar=braces(DTYPE_CHOICES),
        help="round floating-point tensors to this type; keep (default) changes no bit",
    )  # fmt: skip
    group.add_argument(
        "--names", default="hub", metavar="hub|stored|DIR",
        help="names as save_pretrained writes them (hub, default), as stored, or exactly those of the model in DIR",
    )  # fmt: skip
    group.add_argument(
        "--fill-from", type=path, metavar="DIR",
        help="a base model that gives the parameters which the checkpoint was saved without (frozen ones)",
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
    lora.add_argument("--lora-alpha", type=number, metavar="ALPHA", help="alpha, where the checkpoint does not say")


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """How it is written."""
    group = parser.add_argument_group("files")
    group.add_argument(
        "--format", dest="container", type=one_of(CONTAINERS), default="safetensors", metavar=braces(CONTAINERS),
        help="model.safetensors (default) or pytorch_model.bin",
    )  # fmt: skip
    group.add_argument(
        "--max-shard-size", type=size, metavar="SIZE", help="bytes of tensors per weights file (default: 5GB)"
    )
    group.add_argument("--overwrite", action="store_true", help="replace the model that lies at the target")
    group.add_argument(
        "--verify", type=one_of(VERIFY_MODES), default="full", metavar=braces(VERIFY_MODES),
        help="read back all contents (default), samples of them, or the structure alone",
    )  # fmt: skip
    group.add_argument("--check-replicas", action="store_true", help="compare the bytes of all replicas before writing")
