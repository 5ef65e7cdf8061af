"""What a check proved and what it did not, in sentences: the same words at the end of a merge and in `verify`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Findings:
    """Sentences: each goes on from "proven:" or "not proven:"."""

    proven: list[str] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)

    def add_structure(self, *, safetensors: bool, side_files: bool) -> None:
        """Files, headers and index hold. `side_files`: those beside the weights were read, too."""
        agree = f"every {'file' if side_files else 'weights file'} is whole: {{}}, index, names, shapes and types agree"
        if safetensors:
            self.proven.append(agree.format("headers") + "; the safetensors library accepts them")
        else:
            self.proven.append(agree.format("archive"))

    def add_coverage(self) -> None:
        """The pieces of a checkpoint fit together; no file was written yet."""
        self.proven.append("the checkpoint is whole: every element of every tensor has a source")

    def add_architecture(self, family: str | None, *, is_adapter: bool) -> None:
        """Whether anything knows what the names should be. `is_adapter`: there is no base model among them."""
        if family:
            self.proven.append(f"names and shapes are those of {family}")
        elif is_adapter:
            self.unproven.append("that the adapter fits its base model: load both")
        else:
            self.unproven.append("that the names are right for the architecture: they were not checked against one")

    def add_replicas(self, *, compared: bool) -> None:
        """Several ranks hold the same pieces; one of each was read."""
        if compared:
            self.proven.append("all replicas hold the same bytes")
        else:
            self.unproven.append("that all replicas hold the same bytes; `--check-replicas` compares them")

    def add_side_files(self) -> None:
        """Configs and tokenizer have not been looked at."""
        self.unproven.append("the files beside the weights (config, tokenizer, …), which were not compared")

    def add_limit(self) -> None:
        """What no comparison of bytes can show."""
        self.unproven.append("that the model answers well: load it and ask it something")
