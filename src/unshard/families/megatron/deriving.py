"""A config.json in the making."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unshard.families.megatron.outline import Outline
from unshard.words import shorten

_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What `--use-rope-scaling` does (megatron-core `models/common/embeddings/rotary_pos_embedding.py`)."""


@dataclass(slots=True)
class Draft:
    """What is known so far, what had to be assumed, and what is missing."""

    facts: Mapping[str, Any]
    shapes: Outline
    config: dict[str, Any] = field(default_factory=dict)
    assumptions: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def integer(self, name: str) -> int | None:
        """A recorded number that is a size; None for all else."""
        value = self.facts.get(name)
        return value if type(value) is int and value > 0 else None

    def require(self, name: str) -> int | None:
        """A recorded size, for which nothing can stand in."""
        value = self.integer(name)
        if value is None:
            self.missing.append(name)
        return value

    def assume(self, name: str, usual: Any) -> Any:
        """A recorded value of the kind of the usual one; where there is none, the usual one, and that is said."""
        value = self.facts.get(name)
        if value is None:
            self.assumptions.append(f"{name} is not recorded: taken to be {usual}")
            return usual
        if isinstance(value, bool) is not isinstance(usual, bool) or not isinstance(value, (bool, int, float)):
            self.missing.append(f"{name} that makes sense: {shorten(repr(value), 40)} is recorded")
            return usual
        return value

    def number(self, *names: str) -> float | None:
        """The first of these that is recorded and is not 0, as a number; None where there is none."""
        name = next((name for name in names if self.facts.get(name)), None)
        return None if name is None else float(self.assume(name, 1.0))

    def window(self) -> int | None:
        """The size of a sliding window, recorded as (to the left, to the right)."""
        window = self.facts.get("window_size")
        size = window[0] if isinstance(window, (list, tuple)) and window else window
        return size if type(size) is int and size > 0 else None

    def add_rotary(self) -> None:
        """The rotary base, and how positions beyond the first training's are scaled."""
        self.config["rope_theta"] = float(self.assume("rotary_base", 10000))
        factor = self.number("rotary_seq_len_interpolation_factor", "seq_len_interpolation_factor")
        if self.facts.get("use_rope_scaling") or self.facts.get("rope_scaling") is True:
            self.config["rope_scaling"] = {**_LLAMA3, "factor": self.number("rope_scaling_factor") or 8.0}
        elif factor:
            self.config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
        elif self.facts.get("use_rope_scaling") is None:
            self.assumptions.append("how rotary positions are scaled is not recorded: taken not to be scaled")
