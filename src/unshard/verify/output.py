"""The verification that every merge ends with: structure always, contents as far as asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from time import monotonic

from unshard.errors import UnshardError, VerificationError, raise_all
from unshard.options import MergeOptions
from unshard.plan.replicas import has_replicas
from unshard.report.events import Sink
from unshard.report.report import Verification
from unshard.target import Target, TargetFile
from unshard.tensors import Computed, SourceFile, Tensor, Value, contiguous_chunk
from unshard.verify.contents import Pair, check_contents
from unshard.verify.sentences import Findings
from unshard.verify.structure import OUTPUT_ROOT, check_files, read_weights
from unshard.words import bytes_in_words


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
        all_pairs = [*pairs, *side_files]
        result = check_contents(all_pairs, target.roots, roots, options.verify, options.settings, sink, scratch=output)
        raise_all(result.problems)
        compared = result.size
    findings = _describe_findings(target, options, family, compared)
    seconds = monotonic() - started
    return Verification(options.verify, compared, seconds, tuple(findings.proven), tuple(findings.unproven))


def _pair(target: Target, found: Mapping[str, Mapping[str, Tensor]]) -> Iterator[Pair]:
    for directory, values in target.weights_by_directory.items():
        for value in values:
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


def _describe_findings(target: Target, options: MergeOptions, family: str | None, compared: int) -> Findings:
    """What this verification proved, and what it did not."""
    findings = Findings()
    findings.add_structure(safetensors=options.container == "safetensors", side_files=True)
    if options.verify == "full":
        sentence = f"every byte went where the mapping says: {bytes_in_words(compared)} read back and compared"
        findings.proven.append(sentence)
    elif options.verify == "sample":
        sentence = f"samples of every piece went where the mapping says: {bytes_in_words(compared)} compared"
        findings.proven.append(sentence)
        findings.unproven.append("the bytes between the samples; `--verify full` compares all")
    else:
        findings.unproven.append("the contents, which were not read back; `--verify full` compares all")
    findings.add_architecture(family, is_adapter=target.is_adapter)
    if has_replicas(target.sources):
        findings.add_replicas(compared=options.check_replicas)
    if any(isinstance(value, Computed) for value in target.weights):
        findings.unproven.append("that computed values are right beyond their recomputation: they were rounded once")
    findings.add_limit()
    return findings
