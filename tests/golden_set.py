"""The golden checkpoints: written by the training frameworks themselves, with the truth beside each.

`tests/golden/cases/` holds tiny ones. A larger set is used where the environment variable UNSHARD_GOLDEN points to one:
a directory with `cases/`, or one with `cases.tar.xz`, which is unpacked once and kept in the temporary directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMMITTED = Path(__file__).parent / "golden" / "cases"
VARIABLE = "UNSHARD_GOLDEN"

KINDS = ("fsdp1_", "fsdp2_", "tf4_", "mc_", "dcp_", "hfdcp_", "acc_", "ds_")
"""Of the larger set, by the start of their names."""

MEGATRON_KINDS = ("megatron_", "deepspeed_megatron_", "mc_")
"""Kinds whose stored names are Megatron's: of the committed set, and of the larger one."""


@dataclass(frozen=True)
class Run:
    """One use of `unshard merge`, and what must come of it.

    options: what is typed after SRC and OUT; `{case}` stands for the case's directory.
    model:   the directory of the case that must come out as the model, bit for bit; None: no model is written.
    fused:   the model's values are computed, so that their last bits may differ.
    adapter: the directory of the case that must come out as the PEFT adapter.
    error:   a regular expression found in the message of the refusal that is the right answer.
    """

    options: tuple[str, ...] = ()
    model: str | None = "truth"
    fused: bool = False
    adapter: str | None = None
    error: str | None = None

    @property
    def label(self) -> str:
        """A few letters that name the run among those of its case."""
        return "-".join(word.strip("-") for word in self.options if word.startswith("--")) or "plain"


def adapter_runs(*, adapter_alone: bool) -> tuple[Run, ...]:
    """What every checkpoint of a LoRA run must stand; `adapter_alone`: it holds no base weights."""
    only = Run(("--adapter-only",), model=None, adapter="truth_adapter")
    if adapter_alone:
        return Run(model=None, adapter="truth_adapter"), only
    return Run(adapter="truth_adapter"), Run(("--fuse-lora",), model="truth_merged", fused=True), only


@dataclass(frozen=True)
class GoldenCase:
    """A checkpoint with its truths. `source` is what `unshard merge` is given."""

    name: str
    directory: Path
    source: Path
    runs: tuple[Run, ...]

    def command(self, run: Run, output: Path) -> list[str]:
        """The words after `unshard`."""
        options = [option.format(case=self.directory) for option in run.options]
        return ["merge", str(self.source), str(output), *options]

    def side_files(self, run: Run) -> Path | None:
        """Where the side files of the model lie: with the config that is given, else beside the source's tokenizer."""
        if "--config" in run.options:
            return Path(run.options[run.options.index("--config") + 1].format(case=self.directory))
        found = sorted(self.directory.glob("ckpt/**/tokenizer.json")) or sorted(self.directory.glob("ckpt/config.json"))
        return found[-1].parent if found else None


def committed_cases() -> list[GoldenCase]:
    """The cases that lie in the repository."""
    return [_committed(path.parent) for path in sorted(COMMITTED.glob("*/case.json"))]


def _committed(directory: Path) -> GoldenCase:
    facts = json.loads((directory / "case.json").read_text())
    runs = tuple(Run(**(run | {"options": tuple(run["options"])})) for run in facts["runs"])
    return GoldenCase(facts["name"], directory, directory / facts["source"], runs)


def larger_cases() -> list[GoldenCase]:
    """The cases of the larger set; none where there is no larger set."""
    root = larger_set()
    if root is None:
        return []
    directories = sorted(path.parent for path in root.glob("cases/*/case.json"))
    unknown = [directory.name for directory in directories if not directory.name.startswith(KINDS)]
    if unknown:
        raise ValueError(f"kinds of golden checkpoints that tests/golden_set.py does not know: {unknown}")
    return [case for directory in directories for case in _larger(directory)]


def _larger(directory: Path) -> Iterator[GoldenCase]:
    """The checkpoint, and what DeepSpeed's own converter made of it, if it did."""
    yield GoldenCase(directory.name, directory, directory / "ckpt", _larger_runs(directory))
    if (directory / "ckpt_universal").is_dir():
        runs = (Run(("--config", "{case}/ckpt")),)
        yield GoldenCase(f"{directory.name}_converted", directory, directory / "ckpt_universal", runs)


def _larger_runs(directory: Path) -> tuple[Run, ...]:
    """What the entries of the directory, and the words in its name, say of it."""
    if (directory / "noconfig").is_dir():
        bare = Run(("--weights-only",), model="truth_raw")
        return Run(error="--config"), Run(("--config", "{case}/truth")), bare
    if directory.name.endswith("_exclfrozen"):
        return Run(error=r"embed_tokens.*--fill-from"), Run(("--fill-from", "{case}/truth"))
    if (directory / "hf").is_dir():
        return (Run(("--config", "{case}/hf")),)
    if (directory / "truth_adapter").is_dir():
        return adapter_runs(adapter_alone="loraonly" in directory.name)
    if (directory / "truth_raw").is_dir():  # and a buffer that the low-precision truth leaves out
        return (Run(model="truth_raw"),)
    if (directory / "truth16").is_dir():
        return Run(), Run(("--weights", "model"), model="truth16")
    return (Run(),)


def larger_set() -> Path | None:
    """The directory that holds the larger set's `cases/`, unpacked if need be; None where UNSHARD_GOLDEN is not set."""
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    root = Path(named)
    if (root / "cases").is_dir():
        return root
    archive = root / "cases.tar.xz"
    if not archive.is_file():
        raise FileNotFoundError(f"{VARIABLE}={named} holds neither cases/ nor cases.tar.xz")
    return _unpack(archive)


def _unpack(archive: Path) -> Path:
    """Unpack once per version of the archive, whoever comes first: test workers and later runs share the result."""
    facts = archive.stat()
    identity = hashlib.sha256(f"{archive.resolve()} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()[:16]
    place = Path(tempfile.gettempdir()) / f"unshard-golden-{os.getuid()}-{identity}"
    with _lock(place.with_suffix(".lock")):
        if not place.is_dir():
            unfinished = place.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            with tarfile.open(archive) as tar:
                tar.extractall(unfinished, filter="data")
            unfinished.rename(place)
    return place


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
