"""What a run recorded of its adapter beside the tensors, read with tolerance and checked for sense."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unshard.adapters.patterns import pattern_fault
from unshard.errors import ModelError, UnshardError, UsageError

_PATTERN_KEYS = ("rank_pattern", "alpha_pattern")
_LIST_KEYS = ("target_parameters", "modules_to_save")
_LIST_OR_EXPRESSION_KEYS = ("target_modules", "exclude_modules")


@dataclass(frozen=True, slots=True)
class Recorded:
    """The facts of `adapter_config.json`, of verl's `lora_train_meta.json`, or of the settings of a run of Megatron's.

    source:    the file's name, for messages; "" where there is none.
    config:    the whole adapter_config.json, without the fields below; empty for the others, which tell these alone.
    alpha:     None where it is not known. Zero counts as not known: verl's merger writes it where it has no alpha.
    task_type: PEFT's name for it ("CAUSAL_LM"); None where it is not known.
    """

    source: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    rank: int | None = None
    alpha: float | None = None
    alpha_is_given: bool = False
    alpha_is_zero: bool = False
    task_type: str | None = None
    problems: tuple[UnshardError, ...] = ()

    @property
    def is_config(self) -> bool:
        return bool(self.config)


def read_recorded(recorded: Mapping[str, Any] | None, given_alpha: float | None) -> Recorded:
    """The facts from the parsed file, if there is one, and from the command line, which goes first."""
    recorded = recorded or {}
    problems: list[UnshardError] = []
    is_config = "peft_type" in recorded or "target_modules" in recorded
    source = _name_source(recorded, is_config=is_config) if recorded else ""
    method = _plain(recorded.get("peft_type", "LORA"))
    if method != "LORA":
        problems.append(ModelError(f"{source}: adapters of type {method} are not supported, only LORA"))
    rank, alpha = _number(recorded, "r", source, problems), _number(recorded, "lora_alpha", source, problems)
    if rank is not None and (rank < 1 or rank != int(rank)):
        problems.append(ModelError(f"{source}: r is {rank}, expected a positive integer"))
        rank = None
    if given_alpha is not None and (given_alpha == 0 or not math.isfinite(given_alpha)):
        problems.append(UsageError(f"an adapter with a lora_alpha of {given_alpha} has no effect", hint=_ALPHA_HINT))
    _check_shapes(recorded, source, problems)
    return Recorded(
        source=source,
        config=dict(recorded) if is_config and not problems else {},
        rank=int(rank) if rank else None,
        alpha=given_alpha if given_alpha is not None else alpha or None,
        alpha_is_given=given_alpha is not None,
        alpha_is_zero=alpha == 0,
        task_type=_plain(recorded.get("task_type")),
        problems=tuple(problems),
    )


def _name_source(recorded: Mapping[str, Any], *, is_config: bool) -> str:
    """The file that facts come from; those of other files than PEFT's and verl's say it themselves (`source`)."""
    source = recorded.get("source")
    return "adapter_config.json" if is_config else source if isinstance(source, str) else "lora_train_meta.json"


_ALPHA_HINT = "give the lora_alpha of the training run: `--lora-alpha N`"


def _plain(value: object) -> str | None:
    """The name of an enumeration's member however it was written: "CAUSAL_LM", "TaskType.CAUSAL_LM", {"value": …}."""
    if isinstance(value, Mapping):
        value = value.get("value")
    return value.rpartition(".")[2].upper() if isinstance(value, str) and value else None


def _number(recorded: Mapping[str, Any], key: str, source: str, problems: list[UnshardError]) -> float | None:
    value = recorded.get(key)
    if value is None:
        return None
    if not _is_number(value):
        problems.append(ModelError(f"{source}: {key} is {value!r}, expected a number"))
        return None
    return float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**53


def _check_shapes(recorded: Mapping[str, Any], source: str, problems: list[UnshardError]) -> None:
    for key in _PATTERN_KEYS:
        value = recorded.get(key)
        if value and not (isinstance(value, Mapping) and all(_is_number(number) for number in value.values())):
            problems.append(ModelError(f"{source}: {key} is {value!r}, expected module names and numbers"))
            continue
        faults = [pattern_fault(pattern) for pattern in value or ()]
        problems += [ModelError(f"{source}, {key}: {fault}") for fault in faults if fault]
    for key in (*_LIST_KEYS, *_LIST_OR_EXPRESSION_KEYS):
        value = recorded.get(key)
        if isinstance(value, str) and key in _LIST_OR_EXPRESSION_KEYS:
            continue
        if value and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            problems.append(ModelError(f"{source}: {key} is {value!r}, expected a list of names"))
