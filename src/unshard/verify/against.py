"""`verify OUT [--against SRC|HF_DIR]` and verl's `test`: a model checked on its own or against another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from unshard.checkpoint import Note
from unshard.options import MergeOptions
from unshard.report.events import Sink
from unshard.verify.compare import Comparison, Tolerance, compare
from unshard.verify.sentences import Findings
from unshard.verify.sides import Side, is_adapter, is_model, make_side, open_place
from unshard.words import bytes_in_words


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was checked: structure always; `comparison` where there was something to compare with.

    size:             bytes of all tensors of the model that was checked; `tensors` is how many they are.
    proven, unproven: sentences.
    hint:             what may explain the differences, if there are any.
    """

    output: str
    against: str | None
    family: str | None
    is_adapter: bool
    tensors: int
    size: int
    notes: tuple[Note, ...]
    comparison: Comparison | None
    proven: tuple[str, ...]
    unproven: tuple[str, ...]
    hint: str | None = None

    @property
    def holds(self) -> bool:
        return self.comparison is None or self.comparison.holds


def verify_against(
    output: Path, against: Path | None, tolerance: Tolerance, options: MergeOptions, sink: Sink
) -> Verdict:
    """Check the structure of `output`, then compare it with `against`, if given. Either may be a checkpoint.

    Raises an UnshardError where a side cannot be read or its structure does not hold; differences of contents are in
    the verdict.
    """
    catalogs = [open_place(output, replace(options, repair_index=False))]
    catalogs += [open_place(against, options)] if against is not None else []
    if any(is_model(catalog, options) and is_adapter(catalog) for catalog in catalogs):
        options = replace(options, adapter_only=True)
    checked, *others = [make_side(catalog, options, thorough=catalog is catalogs[0]) for catalog in catalogs]
    notes = list(checked.notes)
    if options.backend and all(is_model(catalog, options) for catalog in catalogs):
        text = f"`--backend {options.backend}` says nothing here: what was compared are merged models"
        notes.append(Note(text, level="warning"))
    comparison = hint = None
    for other in others:
        notes += other.notes
        left = checked
        if is_model(catalogs[1], options) and checked.has_adapters and not other.has_adapters:
            left = checked.without_adapters()
            text = f"the adapter of `{output}` was not compared: `{against}` has none"
            notes.append(Note(text, level="warning"))
        comparison = compare(left, other, tolerance, options.settings, sink)
        if not comparison.holds and (checked.is_checkpoint or other.is_checkpoint):
            hint = _explain(comparison, options)
    findings = _describe_findings(checked, str(against), comparison)
    return Verdict(
        output=str(output),
        against=str(against) if against is not None else None,
        family=checked.family,
        is_adapter=checked.is_adapter,
        tensors=len(checked.tensors),
        size=sum(value.size_in_bytes for value in checked.tensors.values()),
        notes=tuple(dict.fromkeys(notes)),
        comparison=comparison,
        proven=tuple(findings.proven),
        unproven=tuple(findings.unproven),
        hint=hint,
    )


def _describe_findings(side: Side, against: str, comparison: Comparison | None) -> Findings:
    findings = Findings()
    if side.is_checkpoint:
        findings.add_coverage()
    else:
        findings.add_structure(safetensors=_is_safetensors(side), side_files=False)
    if comparison is None:
        findings.unproven.append("the contents: `--against` compares them with a source or another model")
    elif comparison.holds:
        size = bytes_in_words(comparison.size)
        equal = "names, shapes and types agree, and every bit is that"
        if not comparison.is_identical:
            equal = "names and shapes agree, and all values are within the tolerance of those"
        findings.proven.append(f"{equal} of {against}: {size} compared")
    else:
        findings.unproven.append(f"that the contents are those of {against}: they differ")
    findings.add_architecture(side.family, is_adapter=side.is_adapter)
    if not side.is_checkpoint:
        findings.add_side_files()
    findings.add_limit()
    return findings


def _is_safetensors(side: Side) -> bool:
    files = {chunk.extent.file.path for value in side.tensors.values() for chunk in getattr(value, "chunks", ())}
    return all(file.endswith(".safetensors") for file in files)


def _explain(comparison: Comparison, options: MergeOptions) -> str | None:
    """Options of the merge that were perhaps left out here."""
    words = list(dict.fromkeys(_missing_words(comparison, options)))
    return f"if the model was merged with {' or '.join(words)}, say so here, too" if words else None


def _missing_words(comparison: Comparison, options: MergeOptions) -> Iterator[str]:
    if any(tensor.dtypes[0] != tensor.dtypes[1] for tensor in comparison.failures) and options.dtype == "keep":
        yield "--dtype"
    if any("lora_" in name for name in comparison.only_right) and not options.fuse_lora:
        yield "--fuse-lora"
    if comparison.only_left and comparison.only_right and options.names == "hub":
        yield "--names"
