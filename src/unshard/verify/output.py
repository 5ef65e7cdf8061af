"""The verification that every merge ends with: structure always, contents as far as asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from time import monotonic

from unshard.errors import UnshardError, VerificationError, raise_all
from unshard.options import MergeOptions
from unshard.report.events import Sink
from unshard.report.report import Verification
from unshard.report.words import bytes_in_words
from unshard.target import Target, TargetFile
from unshard.tensors import Computed, SourceFile, Tensor, Value, contiguous_chunk
from unshard.verify.contents import Pair, check_contents
from unshard.verify.structure import OUTPUT_ROOT, check_files, read_weights


def verify_output(target: Target, output: Path, family: str | None, options: MergeOptions, sink: Sink) -> Verification:
    """Read the output again and compare it with its source.

    Raises VerificationError with everything that differs.
    """
    started = monotonic()
    raise_all(check_files(target, output))
    found = read_weights(target, output)
    pairs = list(_pair(target, found))
    raise_all([problem for pair in pairs for problem in _compare_headers(pair)])
    compared = 0
    if options.verify != "structure":
        side_files = [pair for file in target.files if not file.holds_weights for pair in _pair_side_file(file)]
        roots = {OUTPUT_ROOT: output}
        result = check_contents([*pairs, *side_files], target.roots, roots, options.verify, options.settings, sink)
        raise_all(result.problems)
        compared = result.size
    computed = any(isinstance(pair.expected, Computed) for pair in pairs)
    proven, unproven = _sentences(options, family, compared, computed=computed)
    return Verification(options.verify, compared, monotonic() - started, proven, unproven)


def _pair(target: Target, found: Mapping[str, Mapping[str, Tensor]]) -> Iterator[Pair]:
    for file in target.files:
        if file.holds_weights:
            directory = str(PurePosixPath(file.path).parent)
            for _, value in file.tensors:
                yield Pair(value, found[directory][value.name])


def _pair_side_file(file: TargetFile) -> Iterator[Pair]:
    """A copied side file is its bytes."""
    for offset, value in file.tensors:
        chunk = contiguous_chunk(SourceFile(OUTPUT_ROOT, file.path), offset, value.shape, value.dtype)
        yield Pair(value, Tensor(value.name, value.dtype, value.shape, (chunk,)))


def _compare_headers(pair: Pair) -> Iterator[UnshardError]:
    expected, found = pair.expected, pair.found
    if (expected.dtype, expected.shape) != (found.dtype, found.shape):
        yield VerificationError(
            f"`{expected.name}`: expected {_describe(expected)}, but the output's header says {_describe(found)}"
        )


def _describe(value: Value) -> str:
    return f"{value.dtype} {list(value.shape)}"


def _sentences(
    options: MergeOptions, family: str | None, compared: int, *, computed: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What this verification proved, and what it did not."""
    proven = [
        "every file is whole: headers, index, names, shapes and types agree; the safetensors library accepts them"
    ]
    unproven = []
    if options.verify == "full":
        proven.append(f"every byte went where the mapping says: {bytes_in_words(compared)} read back and compared")
    elif options.verify == "sample":
        proven.append(f"samples of every piece went where the mapping says: {bytes_in_words(compared)} compared")
        unproven.append("the bytes between the samples; `--verify full` compares all")
    else:
        unproven.append("the contents, which were not read back; `--verify full` compares all")
    if options.container == "bin":
        proven[0] = "every file is whole: archive, index, names, shapes and types agree"
    if family:
        proven.append(f"names and shapes are those of {family}")
    else:
        unproven.append("that the names are right for the architecture: no family of unshard knows it")
    if computed:
        unproven.append("that computed values are right beyond their recomputation: they were rounded once")
    unproven.append("that the model answers well: load it and ask it something")
    return tuple(proven), tuple(unproven)
